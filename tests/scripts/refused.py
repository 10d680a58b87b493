"""A worker of ESync that begins its second round after the third, and continues; prints the errors."""

from geomx_cli.contract.settings import Settings
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime.algorithms._esync_client import EsyncClient

client = Client(Settings.from_environment(plugins.table()), EventLog(None), plugins.deliveries()["direct"].worker())
esync = EsyncClient(client)
if client.global_rank == 0:
    for _ in range(3):
        esync.begin()
    esync.await_reports()
client.control.barrier("all")
if client.global_rank == 1:
    esync.begin()
    esync.begin()
    try:
        esync.step()
        esync.step()
    except InvalidSettings as error:
        print("step raised:", error)
    esync.begin()
    esync.leave()
    esync.leave()
    esync.begin()
    esync.await_reports()
    print("left")
client.leave()
client.close()

"""A worker of ESync that begins its second round after the third, and continues; prints the errors."""

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import EventLog
from geomx_cli.ps.client import Client
from geomx_cli.runtime.algorithms._esync_client import EsyncClient
from geomx_cli.runtime.settings import Settings

client = Client(Settings.from_environment(plugins.table()), EventLog(None), plugins.deliveries()["direct"].worker())
pacer = EsyncClient(client)
if client.global_rank == 0:
    for _ in range(3):
        pacer.begin()
    pacer.settle()
client.control.barrier("all")
if client.global_rank == 1:
    pacer.begin()
    pacer.begin()
    try:
        pacer.step()
        pacer.step()
    except InvalidSettings as error:
        print("step raised:", error)
    pacer.begin()
    pacer.leave()
    pacer.leave()
    pacer.begin()
    pacer.settle()
    print("left")
client.leave()
client.close()

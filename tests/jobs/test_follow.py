"""What the views of a job print."""

import io

from geomx_cli.jobs.view.follow import LineView, PlainView


def test_one_of_many_jobs_shows_warnings_only() -> None:
    one, single = io.StringIO(), io.StringIO()
    for view in (LineView(one), PlainView(single)):
        view.note("agents ready")
        view.warn("party-worker-0: the loss is not a number")
    assert one.getvalue() == "party-worker-0: the loss is not a number\n"
    assert single.getvalue() == "agents ready\n" + one.getvalue()

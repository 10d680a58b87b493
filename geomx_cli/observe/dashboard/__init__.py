"""Dashboard: a job in a web page on this machine.

    job_model.py           the job's state, reduced from its events: rows, curves, links, messages
    downsampled_series.py  a time series with a bounded number of points
    event_reader.py        reads the events from the job's hosts
    page_state.py          the data sent to the page
    show.py                runs the parts until the user ends the dashboard
    server.py              the page and its data over HTTP: loopback only, with a token
    static/                the page
"""

"""A job in a web page on this machine.

    job_model.py           what is known of the job, folded from its events: rows, curves, links, messages
    downsampled_series.py  one value over time, in a bounded number of points
    event_stream.py        the events, read from the job's hosts as they come
    page_state.py          what the page is told
    show.py                all of them together, until the user has seen enough
    server.py              the page and its data over HTTP: loopback only, with a token
    static/                the page itself
"""

"""A job in a web page on this machine.

    live.py      what is known of the job, folded from its events: rows, curves, links, messages
    curve.py     one value over time, in a bounded number of points
    feed.py      the events, read from the job's hosts as they come
    view.py      what the page is told
    show.py      all of them together, until the user has seen enough
    server.py    the page and its data over HTTP: loopback only, with a token
    static/      the page itself
"""

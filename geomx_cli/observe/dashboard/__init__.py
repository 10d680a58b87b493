"""Dashboard: a job in a web page on this machine. `static/` has the page.

The data goes from the hosts' event logs through job_model.py, curves.py and job_rows.py to server.py.
"""

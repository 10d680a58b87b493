"""What planning and watching a job shares with the processes of the job: settings, roles, addresses, keys, names.

It needs the standard library only, as planning a job needs neither numpy nor sockets.
"""

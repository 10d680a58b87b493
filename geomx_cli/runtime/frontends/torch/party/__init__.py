"""A party whose workers add their gradients by torch.distributed, and whose first worker exchanges with the servers
(`--reduce torch`).
"""

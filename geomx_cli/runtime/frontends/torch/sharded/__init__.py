"""Models that fully_shard has divided over the workers of each party, which exchange their shards with the servers
(`--reduce torch --shards`).
"""

"""What a server does with contributions to a slice: sum, decide, answer."""

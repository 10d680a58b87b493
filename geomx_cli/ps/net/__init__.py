"""Messages and connections: what two processes send each other, and how it gets there."""

"""Scripts that use torch.distributed: its functions and process groups over the servers of the job."""

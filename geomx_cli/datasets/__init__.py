"""The data sets of the bundled job: what there is, where it comes from, and its files in a folder of this machine."""

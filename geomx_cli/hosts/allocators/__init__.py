"""Allocators, one file each (see hosts/allocation.py). None is built in: the machines of most inventories are fixed."""

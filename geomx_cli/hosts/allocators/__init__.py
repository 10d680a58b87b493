"""Allocators, one per file (see hosts/allocation.py). None is built in; most inventories have fixed machines."""

"""Connector for hosts behind SSH, by paramiko or by OpenSSH's client."""

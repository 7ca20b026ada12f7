"""The kinds of containers. They do not know each other."""

"""Which variant fits: one host, several hosts, a fleet, any node of a scheduler.

The modules here decide for one host, by the order and the `rules`, each in a module of its own. `gang`
decides for the hosts of one job, and `fleet` compares many hosts with a catalog. `needs` derives from the
rules what an image needs of a node, for schedulers.
"""

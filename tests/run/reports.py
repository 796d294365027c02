"""Reports that tests of runs have no use for."""


def silent(line):
    pass

"""Parallelism that needs more than a row of the layout's table: functions of arrays, without modules."""

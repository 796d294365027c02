"""Layouts: which mesh axis each named axis lives on; and beside them how a program is carried out."""

from axon.axes.execution import Execution
from axon.layout.explain import ParameterRow, explain
from axon.layout.placement import Placement, first_devices, mesh_sizes
from axon.layout.roles import roles
from axon.layout.table import KINDS, MESH_AXES, Layout, LayoutError, sequence_parallel, tensor_3d, zero
from axon.layout.validate import ArraySpec, validate, validate_program
from axon.layout.zigzag import zigzag

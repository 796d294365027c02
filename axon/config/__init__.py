"""Configuration: gin's grammar → one tree of typed, frozen dataclasses, the same that Python code builds by hand.

    import models.llama                  # the names of a module: Llama, or llama.Llama, or models.llama.Llama
    from models.llama import Llama as L  # one name
    include 'base.gin'                   # searched for in this file's folder, then in the working directory

    STEPS = 600                          # a macro, used as %STEPS
    Train.model = @Llama()               # an object; @Llama alone is the class itself
    Train.steps = %STEPS
    Llama.layers = 6                     # a field of every Llama; a later binding overrides an earlier one
    small/Llama.layers = 2               # @small/Llama() starts from the bindings without scope and overrides them
    Llama.embed = %REQUIRED              # an including file or --set must bind it (%gin.REQUIRED is the same)

The tree's root is `Train` with its bindings, or `Serve` (see `root_of`). A name is Axon's own (`__all__` of the modules
in AXON) or of a module that one of the files imports; the working directory can be imported from. An object inside a
scope's object is built in that scope, unless its reference names another. Bindings of a class also apply to an object
that is a field's default (`Layout.zero = 1` needs no `Train.layout = @Layout()`), or that a function returns. A binding
or macro of the main file or of `--set` that has no effect is a mistake; an included file may have unused ones, and so
may the main file where `--set` makes them so (`--set Train.sample=None`).
"""

from axon.config.load import AXON, Resolved, dump, load, root_of
from axon.config.mistakes import ConfigError, Mistake, Place

__all__ = ["AXON", "ConfigError", "Mistake", "Place", "Resolved", "dump", "load", "root_of"]

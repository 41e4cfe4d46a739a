"""Tools for mutations: change gradients, single equations of the program, or optimizer leaves."""

import dataclasses

from meshwright.program.jaxpr.equations import name_stack
from meshwright.program.jaxpr.names import module_of
from meshwright.step import optimizer, step_program, train_step


def replace(owner, name, make):
    """Return a mutation that replaces an attribute by ``make(what it was)``."""

    def break_it(patch):
        patch.setattr(owner, name, make(getattr(owner, name)))

    return break_it


def gradients(change):
    """Change what the step computes: ``change(gradients, right, *arguments)``."""

    def make(right):
        return lambda *arguments: change(right(*arguments), right, *arguments)

    return replace(train_step, "compute_gradients", make)


def gradient_values(change):
    """Change each gradient of the step."""
    return gradients(
        lambda found, *_: dataclasses.replace(found, values=[change(g) for g in found.values])
    )


def equation(primitive, module, change):
    """Change one kind of equation of one module, on the mesh only.

    ``change(run, *operands)`` returns the results; ``run(*operands)`` evaluates the equation.
    """

    def make(right):
        def evaluator(*arguments, **options):
            def rule(eqn, env):
                if eqn.primitive.name != primitive or module_of(name_stack(eqn)) != module:
                    return None

                def run(*operands):
                    other = env.with_operands(eqn, operands)
                    return env.evaluator.continue_after(rule, eqn, other)

                return change(run, *env.operands(eqn))

            return right(*arguments, first=[rule], **options)

        return evaluator

    return replace(step_program, "mesh_evaluator", make)


def optimizer_leaves(ending, change):
    """Change the leaves of the optimizer state whose path ends like this, before each step."""

    def make(right):
        def update(self, gradients, leaves, params, objective=None, **settings):
            leaves = [
                change(leaf) if described.path.endswith(ending) else leaf
                for described, leaf in zip(self.leaves, leaves, strict=True)
            ]
            return right(self, gradients, leaves, params, objective, **settings)

        return update

    return replace(optimizer.FlatOptimizer, "update", make)


def new_parameters(change):
    """Change what the optimizer returns: ``change(path, before, after)`` for each parameter."""

    def make(right):
        def update(self, gradients, leaves, params, objective=None, **settings):
            after, leaves = right(self, gradients, leaves, params, objective, **settings)
            paths = [step.leaf.path for step in self._params]
            return [change(*each) for each in zip(paths, params, after, strict=True)], leaves

        return update

    return replace(optimizer.FlatOptimizer, "update", make)

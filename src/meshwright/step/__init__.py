"""The step: loss, gradients, accumulation, loss scaling and the optimizer, compiled as one."""

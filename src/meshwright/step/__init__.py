"""The step: state, loss → gradients → update, accumulation, precision, loss scaling."""

"""The command-line product: data, models, training, report and the command itself."""

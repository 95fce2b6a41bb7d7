"""What a trained model can do: loss by position and document length, accuracy on tasks."""

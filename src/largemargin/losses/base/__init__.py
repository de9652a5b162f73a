"""What every loss is built from: ``Loss``, ``Objective``, schedules and shared pieces."""

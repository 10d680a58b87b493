"""What everything else stands on: errors, options, events, units."""

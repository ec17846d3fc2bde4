"""The EAGLE-3 draft model: configuration, vocabulary map, attention, model, export."""

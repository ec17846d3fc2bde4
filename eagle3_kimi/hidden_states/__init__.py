"""Hidden states of the target model: capture, extraction, the feature store, and the contract check."""

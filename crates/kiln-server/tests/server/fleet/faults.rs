//! Workers, gateways and the queue that die.

//! Strangers, forged messages, poisoned jobs and workers that lie.

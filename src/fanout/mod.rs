//! From one event to many subscribers.

//! Streams of the backend over the simulated driver: order, bounds, failures, and the life of what
//! they hold.

mod common;
mod order;

//! Streams of the backend over the simulated driver: order, bounds, failures, and the life of what
//! they hold.

mod bounds;
mod common;
mod failures;
mod life;
mod order;
mod planted;
mod sweep;
mod work;

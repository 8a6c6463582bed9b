//! Streams of the backend over the simulated driver: order, bounds, failures, and the life of what
//! they hold.

mod bounds;
mod common;
mod failures;
mod life;
mod order;
mod random_order;
mod sweep;
mod work;

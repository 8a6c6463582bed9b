//! The managers own the device's resources and expose them. They do not wait, signal, copy or
//! launch.
//!
//! | manager | owns | kind of pool |
//! |---|---|---|
//! | [`device`] | devices, each with the managers below | fixed slots, created lazily |
//! | [`stream`] | queues, each with a semaphore | growable, recycled, retire list |
//! | [`event`] | timestamps | growable, recycled |
//! | [`host_timeline`] | semaphores that the host signals | growable |
//! | [`pipeline`] | kernels made ready | keyed singletons |
//! | [`graph`] | instantiated plans | growable |
//!
//! This module must not know backings or the traits of `hal`'s devices.

pub mod device;
pub mod event;
pub mod graph;
pub mod host_timeline;
pub mod pipeline;
pub mod stream;

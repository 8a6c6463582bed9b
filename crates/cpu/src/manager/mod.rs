//! The managers: pools that own the device's resources and expose them. Managers do not wait,
//! signal, copy or launch.
//!
//! | manager | owns | kind of pool |
//! |---|---|---|
//! | [`execution`] | the device manager: the top | – |
//! | [`device`] | devices, each with the managers below | fixed slots, created lazily |
//! | [`stream`] | queues and their workers | growable, recycled, retire list |
//! | [`event`] | timestamps | growable, recycled, thread cells |
//! | [`host_timeline`] | host timelines | growable |
//! | [`pipeline`] | kernels as pipelines | keyed singletons |
//! | [`graph`] | instantiated plans | growable |
//! | [`buffer`] | nothing: a view over the allocators' block tables | – |
//!
//! This module must not know backings or the traits of `hal`'s devices.

pub mod buffer;
pub mod device;
pub mod event;
pub mod execution;
pub mod graph;
pub mod host_timeline;
pub mod pipeline;
pub mod stream;

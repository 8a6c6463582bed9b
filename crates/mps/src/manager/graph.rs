//! Graphs: instantiated plans, which launches encode anew.
//!
//! This module must not know how plans are made.

use crate::engine::stream::MpsStream;

/// An instantiated plan.
#[doc(alias = "Graph")]
pub type GraphState = leasehold_hal::engine::payload::GraphState<MpsStream>;

/// Owns the graphs of a device.
#[doc(alias = "MpsGraphManager")]
pub type GraphManager = leasehold_hal::engine::payload::GraphManager<MpsStream>;

//! Graphs: instantiated plans.
//!
//! This module must not know how plans are made.

use crate::engine::stream::CudaStream;

/// An instantiated plan.
#[doc(alias = "Graph")]
pub type GraphState = leasehold_hal::engine::payload::GraphState<CudaStream>;

/// Owns the graphs of a context.
#[doc(alias = "CudaGraphManager")]
pub type GraphManager = leasehold_hal::engine::payload::GraphManager<CudaStream>;

//! The cases, by subject.
//!
//! These modules must not know any backend.

mod attributes;
mod checks;
mod collective_calls;
mod collective_ends;
mod collective_order;
mod completions;
mod copies;
mod devices;
mod events;
mod faults;
mod graph_budget;
mod graphs;
mod growing;
mod growing_parts;
mod kernels;
mod loops;
mod memory;
mod partitions;
mod peers;
mod process;
mod recordings;
mod streams;
mod tensor_maps;
mod threads;
mod timelines;
mod transfers;

use crate::case::Case;

/// All cases, by subject.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [
        devices::CASES,
        streams::CASES,
        timelines::CASES,
        events::CASES,
        memory::CASES,
        growing::CASES,
        growing_parts::CASES,
        transfers::CASES,
        copies::CASES,
        kernels::CASES,
        tensor_maps::CASES,
        attributes::CASES,
        graphs::CASES,
        graph_budget::CASES,
        loops::CASES,
        checks::CASES,
        recordings::CASES,
        faults::CASES,
        partitions::CASES,
        peers::CASES,
        process::CASES,
        threads::CASES,
        completions::CASES,
        collective_calls::CASES,
        collective_order::CASES,
        collective_ends::CASES,
    ]
    .into_iter()
    .flatten()
}

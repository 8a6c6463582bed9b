//! Steps of a program of ranks.
//!
//! As in other programs a step names its objects by slots, so any part of a program is a program.
//! All ranks have the same slots. What lies in them is each rank's own.

use crate::step::{Slot, Span, Work};
use leasehold_collective::{ElementType, Reduce};

/// Slots of arrays.
pub const ARRAYS: u8 = 8;
/// Slots of a rank's streams.
pub const STREAMS: u8 = 3;
/// Slots of communicators. The first two have all ranks. The second one compares each eager call
/// before it is submitted.
pub const COMMS: u8 = 4;
/// Slots of graphs.
pub const GRAPHS: u8 = 2;

/// Elements of an array from one on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The array's slot.
    pub array: Slot,
    /// The first element.
    pub at: u32,
}

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In place if source and destination are the same.
    AllReduce(Reduce),
    /// From the own part if source and destination are in one array.
    AllGather,
    /// Into the own part if source and destination are in one array.
    ReduceScatter(Reduce),
    /// From this rank of the communicator, modulo its size.
    Broadcast(u32),
    /// To this rank of the communicator, modulo its size.
    Reduce(Reduce, u32),
    /// Parts of one array to all ranks, into another array.
    AllToAll,
    /// A send to the rank that is so many further, and a receive from the one as many before.
    Shift(u32),
    /// Without memory.
    Barrier,
}

/// A call of all ranks of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Its kind.
    pub kind: Kind,
    /// Where the results go.
    pub to: At,
    /// Where the elements come from; the same as `to` in calls that have one array.
    pub from: At,
    /// The elements that one rank gives to one rank.
    pub count: u32,
}

/// Calls that are made together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The communicator.
    pub comm: Slot,
    /// The stream on rank 0.
    pub stream: Slot,
    /// How much further the stream is from rank to rank.
    pub turn: u8,
    /// The calls.
    pub calls: Vec<Call>,
}

/// A call that is refused, and does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// A root that is no rank.
    Root,
    /// A destination over the source.
    Overlap,
    /// Elements that do not fit the destination.
    Lengths,
    /// An average of integers.
    Integers,
}

impl Wrong {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Root, Self::Overlap, Self::Lengths, Self::Integers];
}

/// A step. Those without a rank are all ranks'.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Allocates an array with numbers of a seed, in the place of what is there.
    New {
        /// Where it goes.
        array: Slot,
        /// The type of its elements.
        element: ElementType,
        /// Elements.
        len: u32,
        /// The seed.
        seed: u32,
    },
    /// Uploads numbers of a seed into an array of a rank.
    Numbers {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
        /// The array.
        array: Slot,
        /// The seed.
        seed: u32,
    },
    /// Does work on a stream of a rank.
    Own {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
        /// The work.
        work: Work,
    },
    /// Copies through memory that is freed as soon as the copies are submitted.
    Through {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
        /// The destination.
        to: Span,
        /// The source.
        from: Span,
    },
    /// Makes calls.
    Calls(Group),
    /// Records steps as a graph.
    Record {
        /// Where it goes.
        graph: Slot,
        /// Calls, and work of ranks.
        steps: Vec<Step>,
    },
    /// Launches a graph.
    Replay {
        /// The graph.
        graph: Slot,
        /// The stream on rank 0.
        stream: Slot,
        /// How much further the stream is from rank to rank.
        turn: u8,
    },
    /// Drops a graph.
    DropGraph(Slot),
    /// Splits a communicator of all ranks.
    Split {
        /// The communicator.
        comm: Slot,
        /// Where the parts go.
        to: Slot,
        /// Colours and keys, by rank.
        places: Vec<Option<(u32, i32)>>,
    },
    /// Puts a new stream in the place of another one, which is dropped.
    Stream {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
    },
    /// A stream waits for all that another one was given.
    WaitStream {
        /// The rank.
        rank: u32,
        /// The stream that waits.
        stream: Slot,
        /// The other one.
        on: Slot,
    },
    /// A stream waits until the rank signals.
    Hold {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
    },
    /// Lets the rank's stream go on.
    Signal {
        /// The rank.
        rank: u32,
    },
    /// Reads a part back and compares it.
    Check {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
        /// The part.
        span: Span,
    },
    /// Waits for a stream.
    Sync {
        /// The rank.
        rank: u32,
        /// The stream.
        stream: Slot,
    },
    /// Makes a call that is refused.
    Wrong {
        /// The rank.
        rank: u32,
        /// What is wrong.
        wrong: Wrong,
    },
    /// Aborts a communicator of its own that has a call to come. What depends on that call fails,
    /// and nothing else.
    Abort {
        /// Says whether the host holds the call back on all ranks. Else the device has it, and it
        /// waits for rank 0, which never makes it.
        held: bool,
    },
}

/// A program of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// How many ranks there are.
    pub ranks: u32,
    /// The steps. Those without a meaning where they stand are left out.
    pub steps: Vec<Step>,
}

impl Step {
    /// The rank of a step that is not all ranks'.
    pub(crate) fn rank(&self) -> Option<u32> {
        match *self {
            Self::Numbers { rank, .. }
            | Self::Own { rank, .. }
            | Self::Through { rank, .. }
            | Self::Stream { rank, .. }
            | Self::WaitStream { rank, .. }
            | Self::Hold { rank, .. }
            | Self::Signal { rank }
            | Self::Check { rank, .. }
            | Self::Sync { rank, .. }
            | Self::Wrong { rank, .. } => Some(rank),
            _ => None,
        }
    }
}

//! Steps: what a program is made of.
//!
//! A step names its objects by slots, never by values that exist only while it runs. So any part of
//! a program is a program: a step whose slots are empty is left out.

use crate::kernels::Kernel;
use crate::scenes::{Scene, Wrong};

/// A place that holds an object or nothing. Buffers from [`FAR`] on are another device's, from
/// [`PINNED`] on they are pinned, from [`TEMPS`] on they are temporaries of a graph. Streams from
/// [`FAR_STREAM`] on are the other device's.
pub type Slot = u8;

/// The first slot of the other device's buffers.
pub const FAR: Slot = 48;
/// The slot of the other device's default stream. There is one more.
pub const FAR_STREAM: Slot = 16;

/// The first slot of pinned buffers.
pub const PINNED: Slot = 64;
/// The first number of a graph's temporaries.
pub const TEMPS: Slot = 128;

/// Returns whether a buffer is the other device's.
pub(crate) fn is_far(slot: Slot) -> bool {
    (FAR..PINNED).contains(&slot)
}

/// Returns whether a stream is the other device's.
pub(crate) fn is_far_stream(stream: Slot) -> bool {
    stream >= FAR_STREAM
}

/// The default stream of a buffer's device.
pub(crate) fn default_of(slot: Slot) -> Slot {
    if is_far(slot) { FAR_STREAM } else { 0 }
}

/// A part of a buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The buffer's slot.
    pub slot: Slot,
    /// Its first byte.
    pub at: u32,
    /// Bytes.
    pub len: u32,
}

impl Span {
    /// Its bytes.
    pub(crate) fn range(&self) -> std::ops::Range<usize> {
        self.at as usize..(self.at + self.len) as usize
    }
}

/// How an upload hands its bytes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hand {
    /// The call takes them and does not wait.
    Asynchronous,
    /// The call waits.
    Synchronous,
    /// The copy keeps them.
    Owned,
}

/// The operation of a piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Writes a pattern of 1, 2 or 4 bytes.
    Fill {
        /// The pattern.
        pattern: u32,
        /// Its bytes.
        width: u8,
    },
    /// Writes the bytes of a seed.
    Upload {
        /// The seed.
        seed: u32,
        /// How.
        hand: Hand,
    },
    /// Copies on the device.
    Copy,
    /// Copies rows on the device.
    Copy2d {
        /// Bytes of a row.
        width: u32,
        /// Rows.
        rows: u32,
        /// Bytes from row to row of the source.
        from_pitch: u32,
        /// Bytes from row to row of the destination.
        to_pitch: u32,
    },
    /// Copies several parts, of device memory or pinned memory, to parts that lie behind each other
    /// in the written one. One call copies them, the last one first.
    Copies,
    /// Copies between device memory and pinned memory.
    Pinned,
    /// Launches a kernel.
    Launch {
        /// Which.
        kernel: Kernel,
        /// The words after the number of elements.
        words: [u32; 2],
    },
}

/// A piece of work: one operation that writes one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    /// The operation.
    pub op: Op,
    /// The parts that the operation reads.
    pub from: Vec<Span>,
    /// The part that the operation writes.
    pub to: Span,
}

impl Work {
    /// The parts of the written one, one behind the other, as long as the read ones.
    pub(crate) fn places(&self) -> impl Iterator<Item = Span> + '_ {
        self.from.iter().scan(self.to.at, |at, from| {
            let place = Span { at: *at, len: from.len, ..self.to };
            *at += from.len;
            Some(place)
        })
    }
}

/// A node of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// Work on buffers and temporaries.
    Work(Work),
    /// A host call that counts.
    Call,
    /// Records an event.
    Record(Slot),
    /// A loop, or a branch of at most one round. A temporary of its own counts the rounds.
    Loop {
        /// The number of runs of the body.
        rounds: u8,
        /// It is a branch.
        branch: bool,
        /// The body, which copies, fills and launches.
        works: Vec<Work>,
    },
}

impl Node {
    /// The work of a round.
    pub(crate) fn works(&self) -> &[Work] {
        match self {
            Node::Work(work) => std::slice::from_ref(work),
            Node::Loop { works, .. } => works,
            Node::Call | Node::Record(_) => &[],
        }
    }

    /// The number of times that the work is done.
    pub(crate) fn rounds(&self) -> u8 {
        if let Node::Loop { rounds, .. } = self { *rounds } else { 1 }
    }
}

/// The temporary with the rounds that a loop still has. The next one is for the subtraction.
pub(crate) fn rounds_left(temps: usize, node: usize) -> Slot {
    TEMPS + (temps + 2 * node) as Slot
}

/// The end of a loop's body: takes one from the rounds that are left.
pub(crate) fn count_down(left: Slot) -> [Work; 2] {
    let [left, less] = [left, left + 1].map(|slot| Span { slot, at: 0, len: 4 });
    let op = Op::Launch { kernel: Kernel::Scale, words: [1, u32::MAX] };
    [Work { op, from: vec![left], to: less }, Work { op: Op::Copy, from: vec![less], to: left }]
}

/// How a part is read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// On a stream, into memory that is there.
    On(Slot),
    /// By a check in a stream's order.
    Look(Slot),
    /// By the runtime, on the default stream, into new memory.
    New,
    /// The same into memory that the thread reads into again and again.
    Again,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Creates a stream.
    Stream(Slot, i32),
    /// Drops it.
    DropStream(Slot),
    /// Allocates a buffer for first use on a stream.
    Alloc {
        /// Where it goes.
        slot: Slot,
        /// Bytes.
        len: u32,
        /// The stream.
        stream: Slot,
    },
    /// Allocates a buffer and uploads the bytes of a seed.
    New {
        /// Where it goes.
        slot: Slot,
        /// Bytes.
        len: u32,
        /// The seed.
        seed: u32,
    },
    /// Allocates pinned memory.
    Pin {
        /// Where it goes.
        slot: Slot,
        /// Bytes.
        len: u32,
    },
    /// Drops a buffer.
    Drop(Slot),
    /// Clones a buffer's lease and keeps the clone on this thread.
    Clone(Slot),
    /// Drops the thread's oldest clone.
    Unclone,
    /// Does work on a stream.
    Run(Slot, Work),
    /// Launches several kernels as one submission.
    Session(Slot, Vec<Work>),
    /// Launches a kernel by a session that does not wait for its turn, which nobody has.
    Try(Slot, Work),
    /// Reads a part back and compares it.
    Check(Read, Span),
    /// Waits for a stream.
    Sync(Slot),
    /// Asks a stream.
    Query(Slot),
    /// Flushes a stream.
    Flush(Slot),
    /// Waits for the device.
    SyncDevice,
    /// Creates an event.
    Event {
        /// Where it goes.
        slot: Slot,
        /// Says whether it keeps time.
        timing: bool,
    },
    /// Drops it.
    DropEvent(Slot),
    /// Records an event on a stream.
    Record {
        /// The event.
        event: Slot,
        /// The stream.
        stream: Slot,
    },
    /// A stream waits for an event.
    WaitEvent {
        /// The stream.
        stream: Slot,
        /// The event.
        event: Slot,
    },
    /// A stream waits for all that another one was given.
    WaitStream {
        /// The stream that waits.
        stream: Slot,
        /// The other one.
        on: Slot,
    },
    /// Asks an event.
    QueryEvent(Slot),
    /// Waits for an event, and then it must be over.
    SyncEvent(Slot),
    /// The time between two events.
    Elapsed(Slot, Slot),
    /// Creates a host timeline.
    HostTimeline(Slot),
    /// Drops it.
    DropHostTimeline(Slot),
    /// A stream waits for the host timeline's next value.
    Hold {
        /// The stream.
        stream: Slot,
        /// The host timeline.
        host_timeline: Slot,
    },
    /// Raises a host timeline to all that was waited for.
    Signal(Slot),
    /// Raises it in a host call of a stream.
    CallSignal {
        /// The stream.
        stream: Slot,
        /// The host timeline.
        host_timeline: Slot,
    },
    /// A host call that counts.
    Call {
        /// The stream.
        stream: Slot,
        /// By the function for calls that run once.
        once: bool,
    },
    /// Hears of a stream's completion.
    Complete(Slot),
    /// Records a graph.
    Graph {
        /// Where it goes.
        slot: Slot,
        /// The temporaries' bytes.
        temps: Vec<u32>,
        /// The nodes.
        nodes: Vec<Node>,
    },
    /// Drops it.
    DropGraph(Slot),
    /// Launches it on a stream.
    Launch {
        /// The graph.
        graph: Slot,
        /// The stream.
        stream: Slot,
    },
    /// Gives a launch of it other words.
    Params {
        /// The graph.
        graph: Slot,
        /// The node.
        node: u32,
        /// The words.
        words: [u32; 2],
    },
    /// Gives a launch of it another grid.
    Grid {
        /// The graph.
        graph: Slot,
        /// The node.
        node: u32,
        /// The blocks.
        blocks: u32,
    },
    /// Puts another buffer in the place of one that it uses.
    Swap {
        /// The graph.
        graph: Slot,
        /// The buffer that it uses.
        old: Slot,
        /// The other one.
        new: Slot,
    },
    /// Makes a stream the thread's current one.
    Enter(Slot),
    /// Goes back to the one before.
    Leave,
    /// Opens the other device's runtime again.
    Open,
    /// Waits for the other device and lets all go that keeps its runtime.
    Close,
    /// Looks for a buffer whose runtime is closed, on a device of another backend.
    Closed(Slot),
    /// Gives free memory back to the driver.
    Trim,
    /// Takes the executables of idle graphs back.
    TakeIdle,
    /// A call that is refused, about a buffer.
    Wrong(Wrong, Slot),
    /// A scene.
    Scene(Scene),
}

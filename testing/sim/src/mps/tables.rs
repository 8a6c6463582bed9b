//! The objects of the simulated driver, by handle.
//!
//! This module must not know how work runs.

use super::memory::Memory;
use super::work::{CommandState, EncoderState};
use super::{BrokenRule, Effect, broken};
use crate::{EventId, Kernel, Machine, QueueId, SemaphoreId};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{NativeDevice, NativeObject, PipelineInfo, Storage};
use std::collections::{BTreeMap, BTreeSet};

/// The number of objects that exist, for leak checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// References to devices.
    pub devices: usize,
    /// Command queues.
    pub queues: usize,
    /// Command buffers.
    pub command_buffers: usize,
    /// Encoders.
    pub encoders: usize,
    /// Libraries.
    pub libraries: usize,
    /// Functions.
    pub functions: usize,
    /// Compute pipelines.
    pub pipelines: usize,
    /// Heaps.
    pub heaps: usize,
    /// Buffers.
    pub buffers: usize,
    /// Events and shared events.
    pub events: usize,
    /// Fences.
    pub fences: usize,
    /// Residency sets.
    pub residency_sets: usize,
    /// Buffers of counter samples, indirect command buffers and capture scopes.
    pub others: usize,
}

impl Census {
    /// Whether no object exists.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// A command queue.
pub(super) struct QueueState {
    pub(super) device: u32,
    pub(super) label: String,
    /// The most uncompleted command buffers.
    pub(super) most: usize,
    /// Waits for events, in the order of the commits.
    pub(super) front: QueueId,
    /// Recorded after the last of these waits.
    pub(super) passed: EventId,
    /// The numbers of the command buffers that may be uncompleted, in the order of their creation.
    pub(super) in_flight: Vec<u64>,
    /// The end of the last committed command buffer.
    pub(super) last: Option<EventId>,
    /// Command buffers so far.
    pub(super) made: u64,
    /// Commits so far.
    pub(super) commits: u64,
    pub(super) sets: BTreeSet<u64>,
}

/// A library.
pub(super) struct LibraryState {
    pub(super) device: u32,
    pub(super) functions: Vec<String>,
}

/// A compute pipeline.
#[derive(Clone)]
pub(super) struct PipelineState {
    pub(super) device: u32,
    pub(super) kernel: Arc<Kernel>,
    pub(super) info: PipelineInfo,
    pub(super) indirect: bool,
}

/// A heap.
pub(super) struct HeapState {
    pub(super) memory: Arc<Memory>,
    pub(super) placement: bool,
    /// The buffers, by number: offset and bytes.
    pub(super) buffers: BTreeMap<u64, (u64, u64)>,
}

/// A buffer.
#[derive(Clone)]
pub(super) struct BufferState {
    pub(super) memory: Arc<Memory>,
    pub(super) heap: Option<u64>,
    pub(super) addr: u64,
    pub(super) bytes: u64,
}

/// An event of either kind.
#[derive(Clone, Copy)]
pub(super) struct EventState {
    pub(super) device: u32,
    pub(super) shared: bool,
    pub(super) semaphore: SemaphoreId,
}

/// A fence.
#[derive(Clone, Copy)]
pub(super) struct FenceState {
    pub(super) device: u32,
    pub(super) event: EventId,
    /// The queue of the last committed update.
    pub(super) updated_in: Option<u64>,
}

/// A residency set.
#[derive(Default)]
pub(super) struct SetState {
    pub(super) device: u32,
    pub(super) next: BTreeSet<u64>,
    pub(super) committed: BTreeSet<u64>,
}

/// A buffer of timestamps.
pub(super) struct SamplesState {
    pub(super) device: u32,
    pub(super) samples: Vec<EventId>,
}

/// An indirect command buffer.
pub(super) struct IndirectState {
    pub(super) device: u32,
    pub(super) buffers: u32,
    pub(super) commands: Vec<Option<super::indirect::Stored>>,
}

/// A capture scope.
pub(super) struct ScopeState {
    pub(super) device: u32,
    pub(super) open: bool,
}

/// An object.
pub(super) enum Object {
    Device(u32),
    Queue(QueueState),
    Command(Box<CommandState>),
    /// A committed command buffer whose handle was released before the host saw its end.
    Ghost(Box<CommandState>),
    Encoder(Box<EncoderState>),
    Library(LibraryState),
    Function(u32, String),
    Pipeline(PipelineState),
    Heap(HeapState),
    Buffer(BufferState),
    Event(EventState),
    Fence(FenceState),
    Set(SetState),
    Samples(SamplesState),
    Indirect(IndirectState),
    Scope(ScopeState),
}

/// All objects. Numbers are not reused.
#[derive(Default)]
pub(super) struct Tables {
    next: u64,
    pub(super) objects: BTreeMap<u64, Object>,
    pub(super) broken: Vec<BrokenRule>,
}

/// Defines look-ups of one kind of object.
macro_rules! lookups {
    ($($name:ident $variant:ident $state:ty;)*) => {$(
        pub(super) fn $name(&self, number: u64) -> Result<&$state> {
            match self.objects.get(&number) {
                Some(Object::$variant(state)) => Ok(state),
                _ => Err(unknown(stringify!($name), number)),
            }
        }
    )*};
}

/// Defines look-ups for changes of one kind of object.
macro_rules! changes {
    ($($name:ident $variant:ident $state:ty;)*) => {$(
        pub(super) fn $name(&mut self, number: u64) -> Result<&mut $state> {
            match self.objects.get_mut(&number) {
                Some(Object::$variant(state)) => Ok(state),
                _ => Err(unknown(stringify!($variant), number)),
            }
        }
    )*};
}

#[cold]
fn unknown(kind: &str, number: u64) -> Error {
    Error::NotFound(format!("no {kind} of the simulated Metal has handle {number:#x}").into())
}

impl Tables {
    lookups! {
        queue Queue QueueState;
        command Command CommandState;
        library Library LibraryState;
        pipeline Pipeline PipelineState;
        heap Heap HeapState;
        buffer Buffer BufferState;
        event Event EventState;
        fence Fence FenceState;
        set Set SetState;
        samples Samples SamplesState;
        indirect Indirect IndirectState;
    }

    changes! {
        queue_mut Queue QueueState;
        command_mut Command CommandState;
        encoder_mut Encoder EncoderState;
        heap_mut Heap HeapState;
        fence_mut Fence FenceState;
        set_mut Set SetState;
        indirect_mut Indirect IndirectState;
        scope_mut Scope ScopeState;
    }

    /// A command buffer, also one whose handle was released.
    pub(super) fn work(&self, number: u64) -> Option<&CommandState> {
        match self.objects.get(&number)? {
            Object::Command(command) | Object::Ghost(command) => Some(command),
            _ => None,
        }
    }

    /// As [`work`](Self::work), for changes.
    pub(super) fn work_mut(&mut self, number: u64) -> Option<&mut CommandState> {
        match self.objects.get_mut(&number)? {
            Object::Command(command) | Object::Ghost(command) => Some(command),
            _ => None,
        }
    }

    pub(super) fn add(&mut self, object: Object) -> u64 {
        self.next += 1;
        // Handles look like addresses, so that a handle is no small number by accident.
        let number = 0x6000_0000_0000 + self.next * 16;
        self.objects.insert(number, object);
        number
    }

    pub(super) fn device(&self, device: NativeDevice) -> Result<u32> {
        match self.objects.get(&device.0) {
            Some(Object::Device(ordinal)) => Ok(*ordinal),
            _ => Err(unknown("device", device.0)),
        }
    }

    /// The device of any object, 0 for an unknown one.
    pub(super) fn device_of(&self, number: u64) -> u32 {
        match self.objects.get(&number) {
            Some(Object::Device(device) | Object::Function(device, _)) => *device,
            Some(Object::Queue(QueueState { device, .. })) => *device,
            Some(Object::Command(c) | Object::Ghost(c)) => c.device,
            Some(Object::Encoder(e)) => e.device,
            Some(Object::Library(LibraryState { device, .. })) => *device,
            Some(Object::Pipeline(PipelineState { device, .. })) => *device,
            Some(Object::Heap(HeapState { memory, .. })) => memory.device,
            Some(Object::Buffer(BufferState { memory, .. })) => memory.device,
            Some(Object::Event(EventState { device, .. })) => *device,
            Some(Object::Fence(FenceState { device, .. })) => *device,
            Some(Object::Set(SetState { device, .. })) => *device,
            Some(Object::Samples(SamplesState { device, .. })) => *device,
            Some(Object::Indirect(IndirectState { device, .. })) => *device,
            Some(Object::Scope(ScopeState { device, .. })) => *device,
            None => 0,
        }
    }

    /// The memory of a heap or of a buffer without heap.
    pub(super) fn memory_of(&self, number: u64) -> Option<&Arc<Memory>> {
        match self.objects.get(&number)? {
            Object::Heap(heap) => Some(&heap.memory),
            Object::Buffer(buffer) => Some(&buffer.memory),
            _ => None,
        }
    }

    /// Whether a range lies in memory of a shared heap or buffer.
    pub(super) fn is_shared(&self, addr: u64, bytes: u64) -> bool {
        self.objects.keys().filter_map(|number| self.memory_of(*number)).any(|memory| {
            memory.storage == Storage::Shared
                && addr >= memory.addr
                && addr.saturating_add(bytes) <= memory.addr + memory.bytes
        })
    }

    /// Bytes of a device's heaps and buffers.
    pub(super) fn allocated(&self, device: u32) -> u64 {
        let memories = self.objects.values().filter_map(|object| match object {
            Object::Heap(heap) => Some(&heap.memory),
            Object::Buffer(buffer) => Some(&buffer.memory),
            _ => None,
        });
        let each: BTreeMap<u64, u64> =
            memories.filter(|m| m.device == device).map(|m| (m.addr, m.bytes)).collect();
        each.values().sum()
    }

    pub(super) fn census(&self) -> Census {
        let mut census = Census::default();
        for object in self.objects.values() {
            let count = match object {
                Object::Device(_) => &mut census.devices,
                Object::Queue(_) => &mut census.queues,
                Object::Command(_) => &mut census.command_buffers,
                Object::Ghost(_) => continue,
                Object::Encoder(_) => &mut census.encoders,
                Object::Library(_) => &mut census.libraries,
                Object::Function(..) => &mut census.functions,
                Object::Pipeline(_) => &mut census.pipelines,
                Object::Heap(_) => &mut census.heaps,
                Object::Buffer(_) => &mut census.buffers,
                Object::Event(_) => &mut census.events,
                Object::Fence(_) => &mut census.fences,
                Object::Set(_) => &mut census.residency_sets,
                Object::Samples(_) | Object::Indirect(_) | Object::Scope(_) => &mut census.others,
            };
            *count += 1;
        }
        census
    }

    /// Removes an object, and checks the rules of its end. The result holds memory that the caller
    /// drops without the lock.
    pub(super) fn release(&mut self, machine: &Machine, object: NativeObject) -> Option<Object> {
        let number = object.number();
        let Some(removed) = self.objects.remove(&number) else {
            broken(self, Effect::Undefined, format!("release of {object:?}, which does not exist"));
            return None;
        };
        let user = self.objects.values().find_map(|other| match other {
            Object::Command(c) | Object::Ghost(c) if c.may_use(machine, number) => {
                Some(c.name.clone())
            }
            _ => None,
        });
        if let Some(user) = user {
            let text = format!("release of {object:?}, which {user} still uses");
            broken(self, Effect::Undefined, text);
        }
        // The machine's objects exist (they were made with this object), so no error is possible.
        match &removed {
            Object::Queue(queue) => {
                let uncommitted = |b: &u64| self.work(*b).is_some_and(|c| !c.committed);
                if queue.in_flight.iter().any(uncommitted) {
                    let text = format!("release of queue {} under a command buffer", queue.label);
                    broken(self, Effect::Undefined, text);
                }
                // Committed work of the queue still runs.
                for number in &queue.in_flight {
                    if let Some(command) = self.work_mut(*number) {
                        command.let_go(machine);
                    }
                    if let Some(Object::Ghost(_)) = self.objects.get(number) {
                        self.objects.remove(number);
                    }
                }
                drop(machine.queue_destroy(queue.front));
                drop(machine.event_destroy(queue.passed));
            }
            Object::Command(command) => {
                if command.open.is_some() {
                    let text = format!("release of {} with an open encoder", command.name);
                    broken(self, Effect::Abort, text);
                }
                if !command.committed
                    && let Ok(queue) = self.queue_mut(command.queue)
                {
                    queue.in_flight.retain(|b| *b != number);
                }
            }
            Object::Encoder(encoder) if !encoder.ended => {
                let text = format!("{} was released without endEncoding", encoder.name);
                broken(self, Effect::Abort, text);
                if let Ok(command) = self.command_mut(encoder.command) {
                    command.open = None;
                }
            }
            Object::Buffer(buffer) => {
                if let Some(Ok(heap)) = buffer.heap.map(|heap| self.heap_mut(heap)) {
                    heap.buffers.remove(&number);
                }
            }
            Object::Event(event) => drop(machine.semaphore_destroy(event.semaphore)),
            Object::Fence(fence) => drop(machine.event_destroy(fence.event)),
            Object::Samples(samples) => {
                samples.samples.iter().for_each(|sample| drop(machine.event_destroy(*sample)));
            }
            _ => {}
        }
        match removed {
            Object::Command(command) if command.committed && command.outcome.is_none() => {
                self.objects.insert(number, Object::Ghost(command));
                None
            }
            removed => Some(removed),
        }
    }
}

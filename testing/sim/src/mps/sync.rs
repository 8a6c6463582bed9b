//! Events, fences, residency sets and counter samples of the simulated driver.
//!
//! This module must not know how work runs.

use super::tables::{EventState, FenceState, Object, SamplesState, SetState};
use super::{Effect, SimDriver, broken, call_back, outside_handler, told};
use crate::{Command, SemaphoreId};
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{
    Allocation, CounterOps, NativeDevice, NativeEvent, NativeFence, NativeObject,
    NativeResidencySet, NativeSampleBuffer, NativeSharedEvent, ResidencyOps, SignaledHandler,
    SyncOps,
};
use std::ops::Range;
use std::time::Duration;

impl SimDriver {
    fn new_event(&self, api: &'static str, device: NativeDevice, shared: bool) -> Result<u64> {
        let device = self.lock().device(device)?;
        self.enter(api, device)?;
        let semaphore = self.0.machine.semaphore_create(device).map_err(|e| told(api, e))?;
        Ok(self.lock().add(Object::Event(EventState { device, shared, semaphore })))
    }

    /// The semaphore of a shared event.
    fn shared(&self, event: NativeSharedEvent) -> Result<SemaphoreId> {
        let tables = self.lock();
        let state = tables.event(event.0)?;
        if !state.shared {
            return Err(Error::NotFound("an MTLEvent is no MTLSharedEvent".into()));
        }
        Ok(state.semaphore)
    }
}

impl SyncOps for SimDriver {
    unsafe fn event_create(&self, device: NativeDevice) -> Result<NativeEvent> {
        self.new_event("newEvent", device, false).map(NativeEvent)
    }

    unsafe fn shared_event_create(&self, device: NativeDevice) -> Result<NativeSharedEvent> {
        self.new_event("newSharedEvent", device, true).map(NativeSharedEvent)
    }

    unsafe fn signaled_value(&self, event: NativeSharedEvent) -> Result<u64> {
        self.count("signaledValue", self.device_of(event));
        let semaphore = self.shared(event)?;
        self.0.machine.semaphore_value(semaphore).map_err(|e| told("signaledValue", e))
    }

    unsafe fn set_signaled_value(&self, event: NativeSharedEvent, value: u64) -> Result<()> {
        const API: &str = "setSignaledValue";
        self.count(API, self.device_of(event));
        let semaphore = self.shared(event)?;
        self.0.machine.semaphore_signal(semaphore, value).map_err(|e| told(API, e))
    }

    unsafe fn wait_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        timeout: Duration,
    ) -> Result<bool> {
        const API: &str = "waitUntilSignaledValue";
        self.count(API, self.device_of(event));
        outside_handler(&mut self.lock(), API)?;
        let semaphore = self.shared(event)?;
        match self.0.machine.semaphore_wait(semaphore, value, Some(timeout)) {
            Ok(()) => Ok(true),
            // Without steps of another thread the wait is a dead-lock, which ends here too.
            Err(Error::Timeout(_) | Error::InvalidState(_)) => Ok(false),
            Err(error) => Err(told(API, error)),
        }
    }

    unsafe fn on_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        handler: SignaledHandler,
    ) -> Result<()> {
        const API: &str = "notifyListener";
        let device = self.device_of(event);
        self.count(API, device);
        let semaphore = self.shared(event)?;
        let machine = &self.0.machine;
        let lane = machine.queue_create(device).map_err(|e| told(API, e))?;
        let commands = vec![
            Command::WaitSemaphore(semaphore, value),
            Command::Host {
                name: "signaled handler".into(),
                call: Box::new(move || call_back(|| handler(value))),
                always: false,
            },
        ];
        let submitted = machine.submit(lane, commands).map_err(|e| told(API, e));
        // Enqueued commands still run.
        machine.queue_destroy(lane)?;
        submitted
    }

    unsafe fn fence_create(&self, device: NativeDevice) -> Result<NativeFence> {
        let device = self.lock().device(device)?;
        self.enter("newFence", device)?;
        let event = self.0.machine.event_create(device, false).map_err(|e| told("newFence", e))?;
        let fence = FenceState { device, event, updated_in: None };
        Ok(NativeFence(self.lock().add(Object::Fence(fence))))
    }
}

fn member_number(member: Allocation) -> u64 {
    match member {
        Allocation::Heap(heap) => NativeObject::from(heap).number(),
        Allocation::Buffer(buffer) => NativeObject::from(buffer).number(),
    }
}

impl ResidencyOps for SimDriver {
    unsafe fn residency_create(&self, device: NativeDevice, _: u32) -> Result<NativeResidencySet> {
        let device = self.lock().device(device)?;
        if !self.0.config.residency_sets {
            return Err(Error::Unsupported("residency sets need macOS 15".into()));
        }
        self.enter("newResidencySetWithDescriptor", device)?;
        let set = SetState { device, ..SetState::default() };
        Ok(NativeResidencySet(self.lock().add(Object::Set(set))))
    }

    unsafe fn residency_add(&self, set: NativeResidencySet, member: Allocation) -> Result<()> {
        const API: &str = "addAllocation";
        self.count(API, self.device_of(set));
        let number = member_number(member);
        let mut tables = self.lock();
        if let Ok(buffer) = tables.buffer(number)
            && buffer.heap.is_some()
        {
            let text = format!("{API}: a buffer of a heap; its heap is the allocation");
            return Err(broken(&mut tables, Effect::Abort, text));
        }
        if tables.memory_of(number).is_none() {
            return Err(Error::NotFound("no allocation has this handle".into()));
        }
        tables.set_mut(set.0)?.next.insert(number);
        Ok(())
    }

    unsafe fn residency_remove(&self, set: NativeResidencySet, member: Allocation) -> Result<()> {
        self.count("removeAllocation", self.device_of(set));
        self.lock().set_mut(set.0)?.next.remove(&member_number(member));
        Ok(())
    }

    unsafe fn residency_commit(&self, set: NativeResidencySet) -> Result<()> {
        self.count("commit (residency set)", self.device_of(set));
        let mut tables = self.lock();
        let state = tables.set_mut(set.0)?;
        state.committed = state.next.clone();
        Ok(())
    }

    unsafe fn residency_request(&self, set: NativeResidencySet) -> Result<()> {
        self.count("requestResidency", self.device_of(set));
        self.lock().set(set.0).map(drop)
    }

    unsafe fn residency_end(&self, set: NativeResidencySet) -> Result<()> {
        self.count("endResidency", self.device_of(set));
        self.lock().set(set.0).map(drop)
    }
}

impl CounterOps for SimDriver {
    unsafe fn samples_create(
        &self,
        device: NativeDevice,
        count: u32,
    ) -> Result<NativeSampleBuffer> {
        const API: &str = "newCounterSampleBufferWithDescriptor";
        let device = self.lock().device(device)?;
        if !self.0.config.stage_counters {
            return Err(Error::Unsupported(
                "this device samples no timestamps at the boundaries of a pass".into(),
            ));
        }
        self.enter(API, device)?;
        let mut samples = Vec::new();
        for _ in 0..count {
            match self.0.machine.event_create(device, true) {
                Ok(event) => samples.push(event),
                Err(error) => {
                    let destroy = |event| drop(self.0.machine.event_destroy(event));
                    samples.into_iter().for_each(destroy);
                    return Err(told(API, error));
                }
            }
        }
        let state = SamplesState { device, samples };
        Ok(NativeSampleBuffer(self.lock().add(Object::Samples(state))))
    }

    unsafe fn samples_resolve(
        &self,
        samples: NativeSampleBuffer,
        range: Range<u32>,
    ) -> Result<Vec<u64>> {
        const API: &str = "resolveCounterRange";
        self.enter(API, self.device_of(samples))?;
        let mut tables = self.lock();
        let all = &tables.samples(samples.0)?.samples;
        let Some(wanted) = all.get(range.start as usize..range.end as usize) else {
            return Err(broken(&mut tables, Effect::Abort, format!("{API}: {range:?}")));
        };
        let time = |event| self.0.machine.event_time(event).ok().flatten().unwrap_or(u64::MAX);
        Ok(wanted.iter().map(|event| time(*event)).collect())
    }
}

//! Events, fences, residency sets and counter samples.
//!
//! This module must not know managers.

use super::super::ops::{
    Allocation, CounterOps, NativeDevice, NativeEvent, NativeFence, NativeResidencySet,
    NativeSampleBuffer, NativeSharedEvent, ResidencyOps, SignaledHandler, SyncOps,
};
use super::command::call_back;
use super::encoder::range;
use super::{RealDriver, at, failed, give, give_some};
use block2::RcBlock;
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, Result};
use objc2::rc::autoreleasepool;
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2::sel;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLCommonCounterSetTimestamp, MTLCounterSampleBuffer,
    MTLCounterSampleBufferDescriptor, MTLCounterSamplingPoint, MTLCounterSet, MTLDevice, MTLHeap,
    MTLResidencySet, MTLResidencySetDescriptor, MTLSharedEvent, MTLStorageMode,
};
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Duration;

impl SyncOps for RealDriver {
    unsafe fn event_create(&self, device: NativeDevice) -> Result<NativeEvent> {
        self.enter(|| give_some("newEvent", at!(device => MTLDevice).newEvent()).map(NativeEvent))
    }

    unsafe fn shared_event_create(&self, device: NativeDevice) -> Result<NativeSharedEvent> {
        self.enter(|| {
            let event = at!(device => MTLDevice).newSharedEvent();
            give_some("newSharedEvent", event).map(NativeSharedEvent)
        })
    }

    unsafe fn signaled_value(&self, event: NativeSharedEvent) -> Result<u64> {
        self.enter(|| Ok(at!(event => MTLSharedEvent).signaledValue()))
    }

    unsafe fn set_signaled_value(&self, event: NativeSharedEvent, value: u64) -> Result<()> {
        self.enter(|| {
            at!(event => MTLSharedEvent).setSignaledValue(value);
            Ok(())
        })
    }

    unsafe fn wait_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        timeout: Duration,
    ) -> Result<bool> {
        self.enter(|| {
            let limit = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
            Ok(at!(event => MTLSharedEvent).waitUntilSignaledValue_timeoutMS(value, limit))
        })
    }

    unsafe fn on_signaled(
        &self,
        event: NativeSharedEvent,
        value: u64,
        handler: SignaledHandler,
    ) -> Result<()> {
        self.enter(|| {
            // Metal's type lets a block be called many times; Metal calls this one once.
            let handler = Mutex::new(Some(handler));
            let block =
                RcBlock::new(move |_: NonNull<ProtocolObject<dyn MTLSharedEvent>>, value: u64| {
                    let Some(handler) = handler.lock().take() else { return };
                    autoreleasepool(|_| call_back(|| handler(value)));
                });
            let event = at!(event => MTLSharedEvent);
            // SAFETY: Metal copies the block. The handler is `Send`, because the listener's queue
            // calls it on another thread.
            unsafe {
                event.notifyListener_atValue_block(self.listener(), value, RcBlock::as_ptr(&block));
            }
            Ok(())
        })
    }

    unsafe fn fence_create(&self, device: NativeDevice) -> Result<NativeFence> {
        self.enter(|| give_some("newFence", at!(device => MTLDevice).newFence()).map(NativeFence))
    }
}

/// Calls `call` with the base protocol of a set's member.
fn with_member(member: Allocation, call: impl FnOnce(&ProtocolObject<dyn MTLAllocation>)) {
    match member {
        Allocation::Heap(heap) => call(ProtocolObject::from_ref(at!(heap => MTLHeap))),
        Allocation::Buffer(buffer) => call(ProtocolObject::from_ref(at!(buffer => MTLBuffer))),
    }
}

impl ResidencyOps for RealDriver {
    unsafe fn residency_create(
        &self,
        device: NativeDevice,
        capacity: u32,
    ) -> Result<NativeResidencySet> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            if !device.respondsToSelector(sel!(newResidencySetWithDescriptor:error:)) {
                return Err(Error::Unsupported("residency sets need macOS 15".into()));
            }
            let description = MTLResidencySetDescriptor::new();
            // SAFETY: the capacity is a hint; every number is valid.
            unsafe { description.setInitialCapacity(capacity as usize) };
            let set = device.newResidencySetWithDescriptor_error(&description);
            set.map(|s| NativeResidencySet(give(s)))
                .map_err(|e| failed("newResidencySetWithDescriptor", &e))
        })
    }

    unsafe fn residency_add(&self, set: NativeResidencySet, member: Allocation) -> Result<()> {
        self.enter(|| {
            with_member(member, |member| at!(set => MTLResidencySet).addAllocation(member));
            Ok(())
        })
    }

    unsafe fn residency_remove(&self, set: NativeResidencySet, member: Allocation) -> Result<()> {
        self.enter(|| {
            with_member(member, |member| at!(set => MTLResidencySet).removeAllocation(member));
            Ok(())
        })
    }

    unsafe fn residency_commit(&self, set: NativeResidencySet) -> Result<()> {
        self.enter(|| {
            at!(set => MTLResidencySet).commit();
            Ok(())
        })
    }

    unsafe fn residency_request(&self, set: NativeResidencySet) -> Result<()> {
        self.enter(|| {
            at!(set => MTLResidencySet).requestResidency();
            Ok(())
        })
    }

    unsafe fn residency_end(&self, set: NativeResidencySet) -> Result<()> {
        self.enter(|| {
            at!(set => MTLResidencySet).endResidency();
            Ok(())
        })
    }
}

impl CounterOps for RealDriver {
    unsafe fn samples_create(
        &self,
        device: NativeDevice,
        count: u32,
    ) -> Result<NativeSampleBuffer> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            // SAFETY: a constant of the framework.
            let wanted = unsafe { MTLCommonCounterSetTimestamp };
            let sets = device.counterSets();
            let set = sets.iter().flat_map(|sets| sets.iter()).find(|set| *set.name() == *wanted);
            let boundary = MTLCounterSamplingPoint::AtStageBoundary;
            let Some(set) = set.filter(|_| device.supportsCounterSampling(boundary)) else {
                return Err(Error::Unsupported(
                    "this device samples no timestamps at the boundaries of a pass".into(),
                ));
            };
            let description = MTLCounterSampleBufferDescriptor::new();
            description.setCounterSet(Some(&set));
            description.setStorageMode(MTLStorageMode::Shared);
            // SAFETY: Metal reports a count beyond its limit as an error.
            unsafe { description.setSampleCount(count as usize) };
            let samples = device.newCounterSampleBufferWithDescriptor_error(&description);
            samples
                .map(|s| NativeSampleBuffer(give(s)))
                .map_err(|e| failed("newCounterSampleBufferWithDescriptor", &e))
        })
    }

    unsafe fn samples_resolve(
        &self,
        samples: NativeSampleBuffer,
        range: Range<u32>,
    ) -> Result<Vec<u64>> {
        self.enter(|| {
            let samples = at!(samples => MTLCounterSampleBuffer);
            // SAFETY: the range lies in the buffer (the caller's promise).
            let data = unsafe { samples.resolveCounterRange(self::range(&range)) };
            let data = data.ok_or_else(|| Error::Driver {
                api: "resolveCounterRange",
                code: 0,
                name: "nil".into(),
            })?;
            let bytes = data.to_vec();
            let words = bytes.chunks_exact(8).map(|word| {
                let mut ticks = [0; 8];
                ticks.copy_from_slice(word);
                u64::from_ne_bytes(ticks)
            });
            Ok(words.collect())
        })
    }
}

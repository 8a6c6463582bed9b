//! A random program whose results show mistakes in the order of work: edges between streams, reuse
//! of memory, deferred work, graphs, uploads, publication.

use super::work::*;
use super::{Bench, Dice, Subject, two_devices};
use crate::TestKernel;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Lease, Result, Timeline};
use leasehold_hal::{
    Access, Device, KeepAlive, MemoryKind, NodePatch, Op, OpList, Pipeline, Plan, Stream, Upload,
};
use std::time::Duration;

const SEEDS: u64 = 50;

type Findings = Arc<Mutex<Vec<String>>>;

/// Records, when it is dropped, whether the value was published too early.
struct Probe {
    timeline: &'static Timeline,
    value: u64,
    findings: Findings,
}

impl Drop for Probe {
    fn drop(&mut self) {
        if self.timeline.completed() >= self.value {
            self.findings.lock().push(format!(
                "value {} was published before what it kept was given up",
                self.value
            ));
        }
    }
}

struct Scene<'a> {
    device: &'a Lease<dyn Device>,
    a: Lease<dyn Stream>,
    b: Lease<dyn Stream>,
    set: Lease<Pipeline>,
    dice: Dice,
    findings: Findings,
}

impl Scene<'_> {
    fn expect(
        &self,
        what: &str,
        stream: &Lease<dyn Stream>,
        buffer: &Lease<Buffer>,
        byte: u8,
    ) -> Result<()> {
        let bytes = try_read(stream, buffer)?;
        if let Some(at) = bytes.iter().position(|&x| x != byte) {
            self.findings.lock().push(format!("{what}: byte {at} is {} and not {byte}", bytes[at]));
        }
        Ok(())
    }

    fn byte(&mut self) -> u8 {
        1 + self.dice.below(200) as u8
    }

    /// One stream's work waits for another stream's work, more than once.
    fn edges(&mut self) -> Result<()> {
        let (x, y) = (buffer(self.device, &self.a, 4096), buffer(self.device, &self.a, 4096));
        for _ in 0..3 {
            let byte = self.byte();
            for _ in 0..self.dice.below(3) {
                submit(&self.a, &[fill(&x, 0)])?;
            }
            let point = self.a.timeline().at(submit(&self.a, &[fill(&x, u32::from(byte))])?);
            let value = submit(&self.b, &[Op::Wait(point), copy(&x, &y)])?;
            // The fills of the next round wait for the copy of this round.
            submit(&self.a, &[Op::Wait(self.b.timeline().at(value))])?;
            self.expect("an edge between streams", &self.b, &y, byte)?;
        }
        Ok(())
    }

    /// Memory is freed in use, and another stream takes it.
    fn reuse(&mut self) -> Result<()> {
        let out = buffer(self.device, &self.a, 1 << 20);
        let byte = self.byte();
        let x = buffer(self.device, &self.a, 1 << 20);
        let point =
            self.a.timeline().at(submit(&self.a, &[fill(&x, u32::from(byte)), copy(&x, &out)])?);
        // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in
        // order.
        unsafe { x.mark_write(point) };
        drop(x);
        self.a.refresh()?;
        let others: Vec<_> = (0..3).map(|_| buffer(self.device, &self.b, 1 << 20)).collect();
        for other in &others {
            let value = submit(&self.b, &[fill(other, 0xee)])?;
            // SAFETY: the timepoint is of a submission to this stream that uses the buffer, made in
            // order.
            unsafe { other.mark_write(self.b.timeline().at(value)) };
        }
        self.expect("memory that was reused", &self.a, &out, byte)
    }

    /// Deferred work runs in order.
    fn held(&mut self) -> Result<()> {
        let x = buffer(self.device, &self.a, 4096);
        let host_timeline = self.device.host_timeline()?;
        let next = host_timeline.timeline().submitted() + 1;
        submit(&self.a, &[Op::Wait(host_timeline.timeline().at(next)), fill(&x, 0)])?;
        let mut last = 0;
        for _ in 0..2 + self.dice.below(3) {
            last = self.byte();
            submit(&self.a, &[fill(&x, u32::from(last))])?;
        }
        host_timeline.signal_host(next)?;
        self.expect("work that was held back", &self.a, &x, last)
    }

    /// A graph computes the results of its plan, with the addresses of its last update.
    fn graphs(&mut self) -> Result<()> {
        let (x, y, z) = (
            buffer(self.device, &self.a, 4096),
            buffer(self.device, &self.a, 4096),
            buffer(self.device, &self.a, 4096),
        );
        let byte = self.byte();
        let word = u32::from_le_bytes([byte; 4]).to_le_bytes();
        submit(&self.a, &[fill(&x, 0), fill(&y, 0), fill(&z, 0)])?;
        let mut ops = OpList::new();
        ops.push(&dispatch(&self.set, &[bind(&x, Access::Write)], &word));
        ops.push(&copy(&x, &z));
        // SAFETY: the plan's pipelines, timestamps and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { self.device.instantiate(Plan::new(ops)) }?;
        submit(&self.a, &[Op::Graph(&graph)])?;
        self.expect("a graph", &self.a, &z, byte)?;
        let bindings = [bind(&y, Access::Write)];
        // SAFETY: no launch is in flight, and the patches name memory that outlives the launches.
        unsafe {
            graph.update(&[NodePatch {
                node: 0,
                bindings: Some(&bindings),
                params: None,
                grid: None,
            }])
        }?;
        submit(&self.a, &[fill(&x, 0), Op::Graph(&graph)])?;
        self.expect("a graph with another buffer", &self.a, &y, byte)
    }

    /// Pinned memory belongs to the submission until its copy is over.
    fn uploads(&mut self) -> Result<()> {
        let x = buffer(self.device, &self.a, 4096);
        let pinned = self.device.memory(MemoryKind::Pinned)?;
        let take = |byte: u8| -> Result<Lease<Buffer>> {
            let on = On { timeline: self.a.timeline(), source: &*self.a };
            let host = pinned.alloc(Layout::new(4096), on)?;
            // SAFETY: the pinned memory is host memory, and this lease is its only holder.
            unsafe { std::ptr::write_bytes(host.addr() as *mut u8, byte, 4096) };
            Ok(host)
        };
        let byte = self.dice.below(100) as u8 + 1;
        let source = take(byte)?;
        let (src, keep): (_, KeepAlive) = (source.addr() as *const u8, Arc::new(source));
        submit(
            &self.a,
            &[Op::Upload(Upload { src, dst: x.addr(), native: 0, bytes: 4096, keep: Some(&keep) })],
        )?;
        drop(keep);
        let others = [take(201)?, take(202)?];
        self.expect("an upload from pinned memory", &self.a, &x, byte)?;
        drop(others);
        Ok(())
    }

    /// Staging memory belongs to its submission until the copy is over.
    fn staged(&mut self) -> Result<()> {
        let (x, y) = (buffer(self.device, &self.a, 4096), buffer(self.device, &self.a, 4096));
        let (first, second) = (Host::new(vec![self.byte(); 4096]), Host::new(vec![251; 4096]));
        submit(&self.a, &[first.up(&x)])?;
        submit(&self.a, &[second.up(&y)])?;
        self.expect("an upload from other memory", &self.a, &x, first.bytes()[0])
    }

    /// A published value means that the host's part is done.
    fn publication(&mut self) -> Result<()> {
        let x = buffer(self.device, &self.a, 64);
        let bytes = Host::new(vec![self.byte(); 64]);
        let value = self.a.timeline().submitted() + 1;
        let keep: KeepAlive =
            Arc::new(Probe { timeline: self.a.timeline(), value, findings: self.findings.clone() });
        let Op::Upload(upload) = bytes.up(&x) else { return Ok(()) };
        submit(&self.a, &[Op::Upload(Upload { keep: Some(&keep), ..upload })])?;
        drop(keep);
        wait(&self.a, value)
    }

    fn play(&mut self) -> Result<()> {
        for _ in 0..2 {
            match self.dice.below(2) {
                0 => self.edges()?,
                _ => self.held()?,
            }
        }
        self.edges()?;
        self.reuse()?;
        self.held()?;
        self.graphs()?;
        self.uploads()?;
        self.staged()?;
        self.publication()
    }
}

/// The findings of a run with this seed: of the program, of the race detector and of the driver.
fn findings<S: Subject>(seed: u64, config: S::Config) -> Vec<String> {
    let bench = Bench::<S>::with(two_devices::<S>(seed), config);
    let found: Findings = Arc::default();
    {
        let device = bench.open(0);
        let mut scene = Scene {
            a: stream(&device),
            b: stream(&device),
            set: device.pipeline(&S::kernel(TestKernel::Fill)).expect("a pipeline"),
            dice: Dice::new(seed),
            findings: found.clone(),
            device: &device,
        };
        let played = scene.play();
        let done = device.synchronize(Some(Duration::from_secs(5)));
        if let Err(e) = played.and(done) {
            found.lock().push(format!("an error: {e}"));
        }
    }
    let below = bench.findings().unwrap_or_else(|e| vec![format!("left over: {e}")]);
    let mut all = std::mem::take(&mut *found.lock());
    all.extend(below);
    all
}

/// Checks that nothing is found with any of 50 seeds.
///
/// # Panics
/// If something is found.
pub fn nothing_is_found<S: Subject>() {
    for seed in 0..SEEDS {
        assert_eq!(findings::<S>(seed, S::inline()), [""; 0], "seed {seed}");
    }
}

//! Ranks of a case: threads with a device each, which run one program.
//!
//! This module must not know the cases.

use crate::case::{Outcome, Stop, failed, skipped};
use crate::env::Env;
use crate::factory::Ranks;
use crate::variant::Mode;
use leasehold::{Array, Error, HostTimeline, Result, Runtime, Stream, Timepoint};
use leasehold_collective::{CollectiveOps, Comm, CommConfig, Element, World};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A rank of a case, on a thread of its own.
pub(crate) struct Rank<'e> {
    pub(crate) env: &'e Env,
    pub(crate) world: World,
    /// A runtime with a stream of its own.
    pub(crate) runtime: Runtime,
    library: Arc<dyn CollectiveOps>,
}

impl Rank<'_> {
    /// This rank.
    pub(crate) fn me(&self) -> u32 {
        self.world.rank()
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> u32 {
        self.world.size()
    }

    /// The runtime's stream.
    pub(crate) fn stream(&self) -> &Stream {
        self.runtime.stream()
    }

    /// The configuration of a communicator with this name.
    pub(crate) fn config(&self, name: &str) -> CommConfig {
        CommConfig::new(name).ops(self.library.clone()).timeout(self.env.timeout())
    }

    /// A communicator of all ranks.
    pub(crate) fn comm(&self) -> Outcome<Comm> {
        Ok(self.world.comm(&self.runtime, &self.config("tp"))?)
    }

    /// Makes calls on the rank's stream: eager, or as a graph that is launched.
    pub(crate) fn make(&self, calls: impl FnOnce(&Stream) -> Result<()>) -> Outcome {
        match self.env.mode() {
            Mode::Eager => calls(self.stream())?,
            Mode::Replayed => {
                let graph = self.runtime.record_graph(|recording| calls(recording.stream()))?;
                let _ = graph.launch_on(self.stream())?;
            }
        }
        Ok(())
    }

    /// Waits for the work of a stream, within the limit of a wait.
    pub(crate) fn drain(&self, stream: &Stream) -> Outcome {
        Ok(stream.synchronize_timeout(self.env.timeout())?)
    }

    /// Reads memory in the order of the rank's stream.
    pub(crate) fn read<T: Element>(&self, array: &Array<T>) -> Outcome<Vec<T>> {
        self.drain(self.stream())?;
        Ok(self.runtime.to_vec(array)?)
    }

    /// Fails the case unless the memory has these elements, to the bit.
    pub(crate) fn holds<T: Element + fmt::Debug>(
        &self,
        what: &str,
        array: &Array<T>,
        want: &[T],
    ) -> Outcome {
        let got = self.read(array)?;
        let equal =
            got.len() == want.len() && std::iter::zip(&got, want).all(|(a, b)| bits(a).eq(bits(b)));
        if equal {
            return Ok(());
        }
        failed(format!("{what} of {} ranks: {got:?}, not {want:?}", self.size()))
    }

    /// Waits until all ranks have come here.
    pub(crate) fn meet(&self, name: &str) -> Outcome {
        Ok(self.world.barrier(name, self.env.timeout())?)
    }

    /// Fails the case if a point settles within a few milliseconds.
    pub(crate) fn stays_open(&self, point: Timepoint, what: &str) -> Outcome {
        // Work that does not wait runs meanwhile.
        let _ = self.runtime.synchronize_timeout(Duration::from_millis(3));
        if point.is_settled() {
            return failed(format!("{what}: it is over too early"));
        }
        Ok(())
    }

    /// Lets a stream wait until the gate opens.
    pub(crate) fn gate(&self, stream: &Stream) -> Outcome<Gate> {
        let timeline = self.runtime.create_host_timeline()?;
        let point = timeline.next();
        stream.wait(point)?;
        Ok(Gate { timeline, value: point.value() })
    }
}

/// The bytes of an element.
fn bits<T: Element>(x: &T) -> impl Iterator<Item = u8> + use<T> {
    bytemuck::bytes_of(x).to_vec().into_iter()
}

/// A stream that waits. It goes on when the gate opens or is dropped.
#[must_use]
pub(crate) struct Gate {
    timeline: HostTimeline,
    value: u64,
}

impl Gate {
    /// Lets the stream go on.
    pub(crate) fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A timeline of the host's takes any later value.
        let _ = self.timeline.signal(self.value);
    }
}

/// Runs a program with a communicator as each of at most this many ranks.
pub(crate) fn together(
    env: &Env,
    most: u32,
    program: impl Fn(&Rank<'_>, &Comm) -> Outcome + Sync,
) -> Outcome {
    ranks(env, most, |r| program(r, &r.comm()?)).map(drop)
}

/// Runs a program as each of at most this many ranks, at least two, and returns what each gave.
pub(crate) fn ranks<T: Send>(
    env: &Env,
    most: u32,
    program: impl Fn(&Rank<'_>) -> Outcome<T> + Sync,
) -> Outcome<Vec<T>> {
    let Ranks { backend, places, library } = match env.factory().ranks(most) {
        None => return skipped(format!("there is no library of collectives for {}", env.id())),
        Some(Err(Error::Unavailable(why))) => return skipped(format!("no ranks: {why}")),
        Some(made) => made?,
    };
    let context = env.adopt(backend, places.iter().map(|place| place.1))?;
    let run = |world: World, device| -> Outcome<T> {
        let runtime = env.runtime_of(&context, device)?;
        program(&Rank { env, world, runtime, library: library.clone() })
    };
    let outcomes: Vec<Outcome<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = places
            .into_iter()
            .map(|(world, device)| {
                let (run, name) = (&run, format!("case rank {}", world.rank()));
                std::thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, move || run(world, device))
            })
            .collect();
        let ended = threads.into_iter().map(|thread| match thread {
            Err(e) => failed(format!("no thread for a rank: {e}")),
            Ok(thread) => thread.join().unwrap_or_else(|_| failed("it panicked")),
        });
        ended.collect()
    });
    let mut whys = Vec::new();
    for (rank, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Err(Stop::Failed(why)) => whys.push(format!("rank {rank}: {why}")),
            Err(Stop::Skipped(why)) => return skipped(why.clone()),
            Ok(_) => {}
        }
    }
    if whys.is_empty() { outcomes.into_iter().collect() } else { failed(whys.join("; ")) }
}

//! The decode loop: a thread that owns the batch.
//!
//! Each job has a channel for its events. A job whose receiver is gone leaves the batch before the
//! next step, so a client that goes frees its slot. After an error of a step the jobs of the batch
//! end with that error, and the next job makes runtime, model and batch anew.
//!
//! This module must not know HTTP or text.

use crate::api::{Failure, Result};
use leasehold_llama::{Batch, Drawn, Model, Sampling, SequenceId};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::mem::replace;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc::UnboundedSender};

/// Makes the batch, at the start and after a failure. The former one is gone by then.
pub type Load = Box<dyn FnMut() -> leasehold::Result<Batch> + Send>;
/// The time in which tokens are gathered, as to send each one takes a part of a fast step.
const PACE: Duration = Duration::from_millis(10);
pub type Command = Box<dyn FnOnce(&mut Engine) + Send>;

pub struct Job {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    /// New tokens that are still to come.
    pub tokens: usize,
    pub events: UnboundedSender<Event>,
    pub next: (Vec<Drawn>, Instant), // what is sent next, and when something was sent
}

pub enum Event {
    Tokens(Vec<Drawn>),
    End(Result<&'static str>),
}

pub struct Engine {
    load: Load,
    end_tokens: Vec<u32>,
    /// The time without a job after which the weights leave the device.
    idle: Duration,
    used: Instant,
    pub slots: usize,
    batch: Option<Batch>,
    jobs: HashMap<SequenceId, (Job, OwnedSemaphorePermit)>,
    counts: Counts,
}

/// The engine's work so far, in numbers.
#[derive(Default)]
struct Counts {
    prompt_tokens: u64,
    new_tokens: u64,
    ended: u64,
    failed: u64,
}

impl Counts {
    fn end(&mut self, job: &Job, how: Result<&'static str>) {
        *(if how.is_ok() { &mut self.ended } else { &mut self.failed }) += 1;
        job.events.send(Event::End(how)).ok();
    }
}

impl Engine {
    pub fn new(mut load: Load, end_tokens: Vec<u32>, idle: Duration) -> leasehold::Result<Self> {
        let batch = load()?;
        let (slots, batch, jobs) = (batch.slots(), Some(batch), HashMap::new());
        let (used, counts) = (Instant::now(), Counts::default());
        Ok(Self { load, end_tokens, idle, used, slots, batch, jobs, counts })
    }

    /// Returns when nobody can send commands any more, and all jobs are done.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            while self.jobs.is_empty() {
                let asleep = self.batch.as_ref().is_none_or(|batch| batch.model().is_suspended());
                let left = self.idle.saturating_sub(self.used.elapsed());
                match commands.recv_timeout(if asleep { Duration::MAX } else { left }) {
                    Ok(command) => command(&mut self),
                    Err(RecvTimeoutError::Timeout) => {
                        // A device that cannot take the weights away keeps them.
                        self.sleep().ok();
                        self.used = Instant::now();
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            commands.try_iter().for_each(|command| command(&mut self));
            self.used = Instant::now();
            if let Err(why) = self.step() {
                self.batch = None;
                for (_, (job, _)) in self.jobs.drain() {
                    self.counts.end(&job, Err(Failure::new(500, why.to_string())));
                }
            }
        }
    }

    pub fn status(&self) -> Value {
        let weights = self.batch.as_ref().and_then(|batch| batch.model().weights_stats());
        json!({"running": self.jobs.len(), "weight_bytes": weights.map(|stats| stats.reserved)})
    }

    /// The engine's status in the text format of Prometheus, with the requests in the server.
    pub fn metrics(&self, requests: usize) -> String {
        let weights = self.batch.as_ref().and_then(|batch| batch.model().weights_stats());
        let caches = self.batch.as_ref().map_or(0, |batch| batch.cache_bytes().committed);
        let (counts, weights) = (&self.counts, weights.map_or(0, |stats| stats.reserved));
        let mut text = String::new();
        for (name, kind, value) in [
            ("requests", "gauge", requests as u64),
            ("sequences_running", "gauge", self.jobs.len() as u64),
            ("weight_bytes", "gauge", weights),
            ("cache_bytes", "gauge", caches),
            ("prompt_tokens_total", "counter", counts.prompt_tokens),
            ("generation_tokens_total", "counter", counts.new_tokens),
            ("sequences_ended_total", "counter", counts.ended),
            ("sequences_failed_total", "counter", counts.failed),
        ] {
            let name = format!("leasehold_{name}");
            text += &format!("# TYPE {name} {kind}\n{name} {value}\n");
        }
        text
    }

    /// Takes the weights from the device. If the device has ended, the batch is made anew the next
    /// time.
    pub fn sleep(&mut self) -> Result<()> {
        if !self.jobs.is_empty() {
            return Err(Failure::new(409, "requests are running; ask again after them".to_owned()));
        }
        let model = self.batch.as_ref().map(Batch::model).filter(|model| !model.is_suspended());
        let done = model.map_or(Ok(0), Model::suspend).map(drop);
        if model.is_some_and(|model| model.runtime().stream().failure().is_some()) {
            self.batch = None;
        }
        done.map_err(|e| Failure::new(503, e.to_string()))
    }

    /// Brings them back. A batch that cannot be woken is made anew the next time.
    pub fn wake(&mut self) -> Result<&mut Batch> {
        let failed = |e: leasehold::Error| Failure::new(503, e.to_string());
        let batch = self.batch.take().map_or_else(&mut self.load, Ok).map_err(failed)?;
        if batch.model().is_suspended() {
            batch.model().resume().map_err(failed)?;
        }
        self.used = Instant::now();
        Ok(self.batch.insert(batch))
    }

    /// Starts a job. One that the batch refuses fails alone.
    pub fn add(&mut self, job: Job, slot: OwnedSemaphorePermit) {
        match self.wake().and_then(|batch| Ok(batch.add(&job.prompt, job.sampling)?)) {
            Ok(id) => {
                self.counts.prompt_tokens += job.prompt.len() as u64;
                self.jobs.insert(id, (job, slot));
            }
            Err(why) => self.counts.end(&job, Err(why)),
        }
    }

    /// Ends the jobs that nobody waits for, and makes a step. An error is one of the whole batch.
    fn step(&mut self) -> leasehold::Result<()> {
        let Some(batch) = &mut self.batch else { return Ok(()) };
        for (id, _) in self.jobs.extract_if(|_, (job, _)| job.events.is_closed()) {
            batch.remove(id)?;
        }
        // Without memory for all texts, one that lacks it ends, and leaves its own to the others.
        while let Some((id, why)) = batch.grow().into_iter().next() {
            if !why.is_out_of_memory() {
                return Err(why);
            }
            batch.remove(id)?;
            if let Some((job, _)) = self.jobs.remove(&id) {
                self.counts.end(&job, Err(Failure::new(503, why.to_string())));
            }
        }
        for (id, drawn) in batch.step()? {
            let Some((job, _)) = self.jobs.get_mut(&id) else { continue };
            let end = match drawn {
                Ok(drawn) if self.end_tokens.contains(&drawn.token) => Some(Ok("stop")),
                Ok(drawn) => {
                    job.next.0.push(drawn);
                    job.tokens -= 1;
                    self.counts.new_tokens += 1;
                    (job.tokens == 0 || !batch.has_room(id)?).then_some(Ok("length"))
                }
                Err(why) => Some(Err(Failure::new(500, why.to_string()))),
            };
            if end.is_some() || job.next.1.elapsed() >= PACE {
                let (tokens, _) = replace(&mut job.next, (Vec::new(), Instant::now()));
                job.events.send(Event::Tokens(tokens)).ok();
            }
            let Some(end) = end else { continue };
            // A sequence with an error is not in the batch any more.
            if end.is_ok() {
                batch.remove(id)?;
            }
            self.counts.end(job, end);
            self.jobs.remove(&id);
        }
        Ok(())
    }
}

//! Partitions of a device's multiprocessors.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::PartitionSize::{Rest, Sms};
use leasehold::{
    Array, Divide, Error, GraphUpdate, Grid, KernelBase, Lease, Operand, Partition, PartitionSize,
    Runtime, Stream, StreamDesc, View,
};

pub(crate) const CASES: &[Case] = &[
    Case::runtime(
        241,
        "partitions have the multiprocessors that they say, and a device without them says so",
        &[],
        sizes,
    ),
    Case::runtime(
        242,
        "work on partitions is ordered with all other work of its memory",
        &[Need::Kernel(TestKernel::Add), Need::ConcurrentStreams],
        order,
    ),
    Case::runtime(
        243,
        "a graph keeps the partitions of its nodes, on every stream and through updates",
        &[Need::Kernel(TestKernel::Add), Need::Graphs],
        graphs,
    ),
    Case::runtime(
        244,
        "a partition ends after its last lease, stream and work, and not before",
        &[Need::Kernel(TestKernel::Add), Need::Hold],
        ends,
    ),
    Case::runtime(
        245,
        "a partition that cannot be, and a stream where there is none, are refused without a loss",
        &[],
        refused,
    ),
];

/// Elements of an array.
const LEN: usize = 256;

/// A divided device: a quarter, and the rest.
struct Divided {
    runtime: Runtime,
    partitions: Vec<Lease<Partition>>,
    kernel: KernelBase,
}

impl Divided {
    /// `None` on a device without partitions, which says so.
    fn new(env: &Env) -> Outcome<Option<Self>> {
        let runtime = env.runtime()?;
        let Some(partitions) = divide(&runtime)? else { return Ok(None) };
        let kernel = TestKernel::base(env.desc(TestKernel::Add)?)?;
        Ok(Some(Self { runtime, partitions, kernel }))
    }

    /// A stream on a partition.
    fn stream(&self, i: usize) -> leasehold::Result<Stream> {
        self.runtime.create_stream_with(&StreamDesc::on(&self.partitions[i]))
    }

    /// Adds two arrays.
    fn add(
        &self,
        stream: &Stream,
        a: &Array<u32>,
        b: &Array<u32>,
        out: &Array<u32>,
    ) -> leasehold::Result<()> {
        let grid = Grid::new([(LEN as u32) / TestKernel::BLOCK, 1, 1]);
        let grid = grid.threads([TestKernel::BLOCK, 1, 1]);
        let operands: [Operand<'_>; 3] = [a.read(), b.read(), out.write()];
        stream.launch(&self.kernel, &operands, &(), grid).map(drop)
    }
}

fn quarter(runtime: &Runtime) -> u32 {
    (runtime.info().units / 4).max(1)
}

/// Two partitions; `None` on a device without them.
fn divide(runtime: &Runtime) -> Outcome<Option<Vec<Lease<Partition>>>> {
    let made = runtime.partition(&[Sms(quarter(runtime)), Rest]);
    if runtime.raw_device().caps().partitions {
        return Ok(Some(made?));
    }
    let refused = expect_error(made, "Unsupported", "partitions of a device without them")?;
    check!(refused.to_string().contains(&runtime.device().to_string()), "no device in: {refused}");
    Ok(None)
}

fn sizes(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let Some(partitions) = divide(&runtime)? else { return Ok(()) };
    let (units, least) = (runtime.info().units, quarter(&runtime));
    let [first, rest] = &partitions[..] else {
        return crate::case::failed(format!("{} partitions for two sizes", partitions.len()));
    };
    check!(first.units() >= least, "{first:?} for {least} multiprocessors");
    check!(rest.units() >= 1, "{rest:?} for the rest");
    check!(first.units() + rest.units() <= units, "{first:?} and {rest:?} of {units}");
    for partition in &partitions {
        check_eq!(partition.device(), runtime.device(), "the device");
        let stream = runtime.create_stream_with(&StreamDesc::on(partition))?;
        let on = stream.raw().partition();
        check!(on.is_some_and(|on| on.same(partition)), "the partition of a stream on it: {on:?}");
        let values = runtime.upload(&[1u32; LEN])?;
        stream.fill(values.view(), 7u32)?;
        check_eq!(stream.runtime().to_vec(&values)?, vec![7; LEN], "a fill on a partition");
    }
    check!(runtime.create_stream()?.raw().partition().is_none(), "a stream without a partition");
    Ok(())
}

fn order(env: &Env) -> Outcome {
    let Some(d) = Divided::new(env)? else { return Ok(()) };
    let runtime = &d.runtime;
    let streams = [d.stream(0)?, d.stream(1)?, d.stream(0)?, runtime.create_stream()?];
    let (mut a, mut b) = (runtime.upload(&[1u32; LEN])?, runtime.zeros::<u32>(LEN)?);
    let one = runtime.upload(&[1u32; LEN])?;
    // Each addition reads what the one before it wrote, on another stream.
    let rounds = env.rounds(400) as u32;
    for round in 0..rounds {
        d.add(&streams[round as usize % streams.len()], &a, &one, &b)?;
        std::mem::swap(&mut a, &mut b);
    }
    check_eq!(runtime.to_vec(&a)?, vec![1 + rounds; LEN], "sums across partitions");
    // Bytes of the host, events and waits of the host.
    let event = runtime.create_event()?;
    streams[1].upload(one.view(), &vec![5u32; LEN])?;
    streams[1].record(&event)?;
    streams[2].wait_event(&event)?;
    d.add(&streams[2], &one, &one, &b)?;
    streams[2].synchronize()?;
    check_eq!(streams[0].runtime().to_vec(&b)?, vec![10; LEN], "behind an event");
    runtime.synchronize()?;
    Ok(())
}

fn graphs(env: &Env) -> Outcome {
    let Some(d) = Divided::new(env)? else { return Ok(()) };
    let runtime = &d.runtime;
    let a = runtime.upload(&[2u32; LEN])?;
    let (b, c) = (runtime.upload(&[3u32; LEN])?, runtime.zeros::<u32>(LEN)?);
    let out = runtime.zeros::<u32>(LEN)?;
    // One node on each partition, and one on the whole device.
    let graph = runtime.record_graph(|recorded| {
        let on = |i: usize| recorded.create_stream_with(&StreamDesc::on(&d.partitions[i]));
        let between = recorded.alloc_array::<u32>(LEN)?;
        d.add(&on(0)?, &a, &b, &between)?;
        d.add(&on(1)?, &between, &a, &c)?;
        d.add(recorded.stream(), &c, &b, &out)
    })?;
    let streams = [runtime.create_stream()?, d.stream(0)?, d.stream(1)?];
    for (i, stream) in streams.iter().enumerate() {
        stream.fill(out.view(), 0u32)?;
        graph.launch_on(stream)?;
        check_eq!(stream.runtime().to_vec(&out)?, vec![10; LEN], "a launch on stream {i}");
    }
    // The graph keeps its partitions.
    drop(streams);
    let Divided { runtime, partitions, .. } = d;
    drop(partitions);
    let again = runtime.partition(&[Rest]);
    expect_error(again, "InvalidState", "a division while a graph has the former one")?;
    let other = runtime.upload(&[4u32; LEN])?;
    let _ = graph.update(&GraphUpdate::new().buffer(a.buffer(), other.buffer()))?;
    graph.launch()?;
    check_eq!(runtime.to_vec(&out)?, vec![14; LEN], "a launch after an update");
    drop(graph);
    runtime.synchronize()?;
    check_eq!(runtime.partition(&[Rest])?.len(), 1, "a division once the graph is gone");
    Ok(())
}

fn ends(env: &Env) -> Outcome {
    let Some(d) = Divided::new(env)? else { return Ok(()) };
    let (a, out) = (d.runtime.upload(&[2u32; LEN])?, d.runtime.zeros::<u32>(LEN)?);
    d.runtime.synchronize()?;
    let stream = d.stream(0)?;
    let hold = env.hold_runtime(&stream)?;
    d.add(&stream, &a, &a, &out)?;
    let last = stream.now();
    drop(stream);
    let Divided { runtime, partitions, .. } = d;
    drop(partitions);
    // Other streams come and go meanwhile.
    for _ in 0..4 {
        drop(runtime.create_stream()?);
    }
    let again = runtime.partition(&[Rest]);
    expect_error(again, "InvalidState", "a division while the former one has work")?;
    hold.release()?;
    runtime.wait_for([last])?;
    check_eq!(runtime.to_vec(&out)?, vec![4; LEN], "the work that the partition had");
    let mut made = None;
    env.until("the partition has ended", || {
        made = runtime.partition(&[Rest]).ok();
        made.is_some()
    })?;
    let whole = made.unwrap_or_default();
    // A closed partition keeps its streams, and gets no others.
    let stream = runtime.create_stream_with(&StreamDesc::on(&whole[0]))?;
    whole[0].close();
    check!(whole[0].is_closed(), "a closed partition says so");
    let refused = runtime.create_stream_with(&StreamDesc::on(&whole[0]));
    expect_error(refused.map(drop), "InvalidArgument", "a stream on a closed partition")?;
    stream.fill(out.view(), 9u32)?;
    check_eq!(stream.runtime().to_vec(&out)?, vec![9; LEN], "work of a closed partition");
    Ok(())
}

fn refused(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (values, units) = (runtime.upload(&[3u32; LEN])?, runtime.info().units);
    let Some(partitions) = divide(&runtime)? else { return Ok(()) };
    let refuse = |sizes: &[PartitionSize], what: &str| {
        expect_error(runtime.partition(sizes), "InvalidArgument", what)
    };
    refuse(&[], "a division into nothing")?;
    refuse(&[Sms(0), Rest], "a partition of nothing")?;
    refuse(&[Rest, Sms(1)], "a size behind the rest")?;
    refuse(&[Sms(units), Rest], "a rest of nothing")?;
    refuse(&[Sms(u32::MAX), Sms(u32::MAX)], "more than there can be")?;
    let too_many = refuse(&[Sms(units + 1)], "more than the device has")?;
    check!(too_many.to_string().contains(&units.to_string()), "no number in: {too_many}");
    let twice = expect_error(runtime.partition(&[Rest]), "InvalidState", "a second division")?;
    check!(twice.to_string().contains("drop"), "no advice in: {twice}");
    // A partition of another device, which may have none itself.
    let other = match env.other() {
        Ok(other) => Some(other),
        Err(crate::case::Stop::Skipped(_)) => None,
        Err(e) => return Err(e),
    };
    if let Some(other) = other {
        let made = other.device.stream(&StreamDesc::on(&partitions[0])).map(drop);
        let strange = expect_error(made, "InvalidArgument", "a stream on another device's")?;
        check!(strange.to_string().contains(&runtime.device().to_string()), "{strange}");
    }
    if runtime.raw_device().caps().conditionals {
        let flag = runtime.upload(&[1_u32])?;
        let within = runtime.record_graph(|recorded| {
            recorded.stream().record_while(&flag, |body| {
                let on = body.create_stream_with(&StreamDesc::on(&partitions[0]))?;
                on.fill(flag.view(), 0_u32)
            })
        });
        expect_error(within.map(drop), "Unsupported", "a partition in the body of a loop")?;
    }
    let stream = runtime.create_stream_with(&StreamDesc::on(&partitions[1]))?;
    check_eq!(stream.runtime().to_vec(&values)?, vec![3; LEN], "what was there before");
    let made: Result<(), Error> = runtime.create_stream().map(drop);
    Ok(made?)
}

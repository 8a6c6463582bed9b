//! Cases of launches with clusters of blocks, and of cooperative ones, over a runtime.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, skipped};
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::graph::{GraphUpdate, NodeId};
use leasehold::kernel::{Grid, Launch};
use leasehold::{Error, KernelBase, Runtime, View};

const CLUSTER: &[Need] = &[Need::Kernel(TestKernel::Cluster), Need::Graphs];
const TOGETHER: &[Need] = &[Need::Kernel(TestKernel::Together), Need::Graphs];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(257, "blocks of a cluster read each other's shared memory", CLUSTER, clusters)
        .sanitizer(),
    Case::runtime(258, "blocks of a cooperative launch wait for each other", TOGETHER, together),
    Case::runtime(
        259,
        "a cooperative launch of more blocks than run at a time never reaches the device",
        TOGETHER,
        too_many,
    ),
];

/// The kernel on a runtime. A device that has no such launches skips the case.
fn kernel(env: &Env, runtime: &Runtime, which: TestKernel) -> Outcome<KernelBase> {
    let kernel = TestKernel::base(env.desc(which)?)?;
    match kernel.prepare(runtime) {
        Err(Error::Unsupported(why)) => skipped(why.into_owned()),
        made => Ok(made.map(|()| kernel)?),
    }
}

fn grid(blocks: [u32; 3]) -> Grid {
    Grid::new(blocks).threads([TestKernel::BLOCK, 1, 1])
}

/// The number of the next block in its cluster, for each block of a grid.
fn next([across, down, deep]: [u32; 3]) -> Vec<u32> {
    let of = TestKernel::CLUSTER;
    let block = |b: u32| {
        let at = [b % across, b / across % down, b / across / down];
        let [x, y, z]: [u32; 3] = std::array::from_fn(|i| at[i] % of[i]);
        let rank = (x + of[0] * (y + of[1] * z) + 1) % of.iter().product::<u32>();
        let place = [rank % of[0], rank / of[0] % of[1], rank / of[0] / of[1]];
        let [x, y, z]: [u32; 3] = std::array::from_fn(|i| at[i] / of[i] * of[i] + place[i]);
        [x + across * (y + down * z); TestKernel::BLOCK as usize]
    };
    (0..across * down * deep).flat_map(block).collect()
}

fn clusters(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime, TestKernel::Cluster)?;
    let out = runtime.zeros::<u32>(48 * TestKernel::BLOCK as usize)?;
    let operands = [out.write()];
    let holds = |blocks: [u32; 3], what: &str| -> Outcome {
        let wanted = next(blocks);
        let found = runtime.to_vec(out.slice(..wanted.len()))?;
        check!(found == wanted, "{what} of {blocks:?}");
        runtime.stream().fill(out.view(), 0u32)?;
        Ok(())
    };
    for blocks in [[2, 1, 2], [4, 3, 2], [2, 5, 4], [8, 1, 6]] {
        runtime.stream().launch(&kernel, &operands, &(), grid(blocks))?;
        holds(blocks, "a launch")?;
    }
    let launch =
        |blocks| Launch { kernel: &kernel, operands: &operands, params: &[], grid: grid(blocks) };
    runtime.stream().launch_many(&[launch([8, 1, 6]), launch([2, 3, 2])])?;
    let found = runtime.to_vec(out.slice(..12 * TestKernel::BLOCK as usize))?;
    check!(found == next([2, 3, 2]), "launches of one submission");
    let graph =
        runtime.record_graph(|r| r.stream().launch(&kernel, &operands, &(), grid([4, 3, 2])))?;
    graph.launch()?;
    holds([4, 3, 2], "a graph")?;
    let _ = graph.update(&GraphUpdate::new().grid(NodeId::new(0), [2, 5, 4]))?;
    graph.launch()?;
    holds([2, 5, 4], "an updated graph")?;
    let before = runtime.stream().now();
    let refused = graph.update(&GraphUpdate::new().grid(NodeId::new(0), [3, 1, 2]));
    expect_error(refused, "InvalidArgument", "an update by a grid that is not made of clusters")?;
    let refused = runtime.stream().launch(&kernel, &operands, &(), grid([2, 2, 1]));
    expect_error(refused, "InvalidArgument", "a grid that is not made of clusters")?;
    check_eq!(runtime.stream().now(), before, "the stream's end after refused launches");
    graph.launch()?;
    holds([2, 5, 4], "a graph after refused updates")
}

fn together(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime, TestKernel::Together)?;
    let most = kernel.resident_blocks(&runtime, TestKernel::BLOCK, 0)?;
    check!(most >= u64::from(runtime.info().units), "{most} blocks at a time");
    let most = most.min(4096) as u32;
    let arrived = runtime.zeros::<u32>(1)?;
    let out = runtime.zeros::<u32>((most * TestKernel::BLOCK) as usize)?;
    let operands = [arrived.read_write(), out.write()];
    let holds = |blocks: u32, what: &str| -> Outcome {
        let found = runtime.to_vec(out.slice(..(blocks * TestKernel::BLOCK) as usize))?;
        check!(found.iter().all(|&n| n == blocks), "{what} of {blocks} blocks");
        runtime.stream().fill(arrived.view(), 0u32)?;
        Ok(())
    };
    for blocks in [1, 2, most / 2, most] {
        runtime.stream().launch(&kernel, &operands, &(), grid([blocks, 1, 1]))?;
        holds(blocks, "a launch")?;
    }
    let graph =
        runtime.record_graph(|r| r.stream().launch(&kernel, &operands, &(), grid([most, 1, 1])))?;
    graph.launch()?;
    holds(most, "a graph")?;
    let _ = graph.update(&GraphUpdate::new().grid(NodeId::new(0), [2, 3, 1]))?;
    graph.launch()?;
    holds(6, "an updated graph")
}

fn too_many(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let kernel = kernel(env, &runtime, TestKernel::Together)?;
    let most = kernel.resident_blocks(&runtime, TestKernel::BLOCK, 0)?;
    let Ok(beyond) = u32::try_from(most + 1) else { return skipped("more blocks than a number") };
    let arrived = runtime.zeros::<u32>(1)?;
    let out = runtime.zeros::<u32>((beyond * TestKernel::BLOCK) as usize)?;
    let operands = [arrived.read_write(), out.write()];
    let launch = |blocks| Launch {
        kernel: &kernel,
        operands: &operands,
        params: &[],
        grid: grid([blocks, 1, 1]),
    };
    let before = runtime.stream().now();
    let Err(why) = runtime.stream().launch_many(&[launch(2), launch(beyond)]) else {
        check!(false, "a launch of {beyond} blocks");
        return Ok(());
    };
    let text = why.to_string();
    check!(text.contains(&format!("runs {most} of 64 threads")), "the bound is not in: {text}");
    expect_error::<()>(Err(why), "InvalidArgument", "more blocks than run at a time")?;
    check_eq!(runtime.stream().now(), before, "the stream's end after a refused launch");
    let graph =
        runtime.record_graph(|r| r.stream().launch(&kernel, &operands, &(), grid([2, 1, 1])))?;
    let refused = graph.update(&GraphUpdate::new().grid(NodeId::new(0), [beyond, 1, 1]));
    expect_error(refused, "InvalidArgument", "an update to more blocks than run at a time")?;
    graph.launch()?;
    check_eq!(runtime.to_vec(&out)?[..128], [2; 128], "a graph after a refused update");
    Ok(())
}

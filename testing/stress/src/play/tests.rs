//! Scenes of single steps that the play must get right.

use super::*;
use crate::generate::Program;
use crate::model::Shape;
use crate::step::{Node, Op, Span, Work};

fn plan(steps: Vec<Step>) -> Arc<Plan> {
    let steps: Vec<_> = steps.into_iter().map(|s| (0, s)).collect();
    let count = steps.len();
    let plan = Program { shape: Shape::new(1, Far::None), steps }.plan();
    assert_eq!(plan.steps.len(), count, "a step has no meaning");
    Arc::new(plan)
}

#[test]
fn a_graph_is_given_up_where_its_new_buffer_is_missing() {
    let fill = Work {
        op: Op::Fill { pattern: 7, width: 1 },
        from: vec![],
        to: Span { slot: 0, at: 0, len: 64 },
    };
    let plan = plan(vec![
        Step::New { slot: 0, len: 64, seed: 1 },
        Step::Graph { slot: 0, temps: vec![], nodes: vec![Node::Work(fill)] },
        Step::New { slot: 1, len: 64, seed: 2 },
        Step::Swap { graph: 0, old: 0, new: 1 },
        Step::Launch { graph: 0, stream: 0 },
    ]);
    let bench = Target::new("cpu:0".parse().unwrap(), false).unwrap().open(0, false).unwrap();
    let mut world = World::new(&bench, Watch::new(plan.clone()), Border::Rust);
    world.strict = false;
    let mut own = Own::default();
    // The second buffer cannot be made, as it were.
    let done: Vec<_> = [0, 1, 3, 4]
        .iter()
        .map(|&i: &usize| world.step(&plan.steps[i], &mut own).is_ok())
        .collect();
    assert_eq!(
        done,
        [true, true, false, false],
        "the graph is launched as it was, and the model does not know"
    );
    drop(world);
    bench.close().unwrap();
}

/// On the simulated device the call comes late, so that the program's end is there first.
#[test]
#[cfg(feature = "cuda")]
fn a_host_timeline_that_a_call_is_to_raise_is_signalled_by_nobody_else() {
    let plan = plan(vec![
        Step::Stream(1, 0),
        Step::HostTimeline(1),
        Step::Hold { stream: 0, host_timeline: 1 },
        Step::CallSignal { stream: 1, host_timeline: 1 },
    ]);
    let target = Target::new("sim:0".parse().unwrap(), true).unwrap();
    for seed in (0..200).step_by(4) {
        assert_eq!(target.weather(seed, true), Weather::Late);
        assert_eq!(
            play(&target, seed, true, plan.clone(), Duration::from_secs(60), Border::Rust),
            Ok(()),
            "seed {seed}"
        );
    }
}

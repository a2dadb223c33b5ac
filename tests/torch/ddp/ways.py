"""Cases of the comparison: ways to train."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from tests.torch.ddp.layers import Branches, Checkpointed, Outputs, Words, frozen, layer
from tests.torch.ddp.side import (
    Side,
    back,
    floats,
    images,
    integers,
    loss_of,
    net,
    plain_sgd,
    sgd,
    train,
)


def optimized(make: Callable[[Any], Any]) -> Callable[[Side], Any]:
    return lambda side: train(side, net(), floats(5, 6), optimizer=make, steps=4)


def stepping(step_of: Callable[[Any, Any, Any], Any], **options: Any) -> Callable[[Side], Any]:
    return lambda side: train(side, net(), floats(5, 6), step_of=step_of, **options)


def accumulates(model: Any, optimizer: Any, x: Any) -> Any:
    with model.no_sync():
        back(model(x))
        back(model(x * 2))
    return back(model(x * 3))


def accumulates_in_rows(model: Any, optimizer: Any, x: Any) -> Any:
    with model.no_sync():
        back(model(x))
    return back(model(x[:2]))


def accumulates_synchronised(model: Any, optimizer: Any, x: Any) -> Any:
    back(model(x))
    return back(model(x * 2))


def clips_norm(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss


def clips_value(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return loss


def edits_gradients(model: Any, optimizer: Any, x: Any) -> Any:
    loss = back(model(x))
    for parameter in model.parameters():
        parameter.grad = parameter.grad.sign()
    return loss


def autocasts(model: Any, optimizer: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    return back(output)


def several_forwards(model: Any, optimizer: Any, x: Any) -> Any:
    return back((model(x), model(x * 2), model(x[:1])))


def penalises_gradients(model: Any, optimizer: Any, x: Any) -> Any:
    x = x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return back((output, gradient))


def looks_between(model: Any, optimizer: Any, x: Any) -> Any:
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model.module(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    return back(model(x))


def keeps_zeros(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    return back(model(x))


def gradient_of_the_input(model: Any, optimizer: Any, x: Any) -> Any:
    x = x.requires_grad_()
    loss = back(model(x))
    return torch.stack([loss, x.grad.sum()])


def lbfgs(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    x = side.batch(0, 5, 6)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = back(model(x))
        side.note("loss", loss)
        # By its own loss each rank would search another way.
        return sum(parameter.grad.abs().sum() for parameter in model.parameters())

    for _ in range(2):
        optimizer.step(closure)
    side.note("end", module)


def frozen_while(side: Side) -> None:
    module = frozen(net(), "0.weight", "2.bias")
    train(side, module, floats(5, 6))


def frozen_later(side: Side) -> None:
    """Each freezes and wraps again: DistributedDataParallel would wait for the gradient for ever."""
    module = net()
    for names in ((), ("0.weight",), ("0.weight", "0.bias"), ()):
        frozen(module, *names)
        module.zero_grad()
        train(side, module, floats(5, 6), steps=2)


def unfrozen_later(side: Side) -> None:
    """Ours goes on; DistributedDataParallel, which never reduces what was frozen, is made again."""
    module = frozen(net(), "0.weight", "2.bias", "4.weight")
    model = side.wrap(module)
    for names in (("0.weight", "4.weight"), ("0.weight",), ()):
        frozen(module, *names)
        module.zero_grad()
        model = model if side.ours else side.wrap(module)
        optimizer = sgd(module.parameters())
        for step in range(2):
            optimizer.zero_grad()
            side.note("loss", back(model(side.batch(step, 5, 6))))
            optimizer.step()
            side.note(f"step {step}", module)


def frozen_for_a_while(side: Side) -> None:
    module = net()

    def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
        frozen(module, *(["0.weight", "2.bias"] if step % 2 else []))

    train(side, module, floats(5, 6), steps=5, between=between, unused=True)


def ways(*by_rank: str) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        train(
            side,
            Branches(),
            floats(5, 6),
            unused=True,
            step_of=lambda model, _, x: back(model(x, by_rank[side.rank])),
        )

    return run


def changing_ways(side: Side) -> None:
    turns = iter(["left", "right", "left", "left", "right", "right"])
    train(
        side, Branches(), floats(5, 6), unused=True, steps=6, small=True,
        step_of=lambda model, _, x: back(model(x, next(turns))),
    )  # fmt: skip


def loss_of_a_part(side: Side) -> None:
    train(side, Outputs(), floats(5, 6), unused=True, step_of=lambda model, _, x: back(model(x)["a"]))


def uneven_sizes(side: Side) -> None:
    train(side, net(), lambda side, step: side.batch(step, 3 + 4 * side.rank, 6))


def hooked(side: Side) -> None:
    module = net()
    seen: list[Any] = []
    module[0].weight.register_hook(lambda gradient: gradient * 2)
    module[2].register_forward_hook(lambda layer, given, output: output + 1)
    module[4].register_full_backward_hook(lambda layer, inner, outer: (inner[0] * 3,))
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    train(side, module, floats(5, 6))
    for gradient in seen:
        side.note("own gradient", gradient)


def scaled(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(side.batch(step, 5, 6) * (1e30 if step == 1 and side.rank else 1)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        side.note("scale", scaler.get_scale())
        side.note(f"step {step}", module)


def scheduled(make: Callable[[Any], Any]) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        schedules: list[Any] = []

        def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
            schedules[0].step()
            side.note("rate", optimizer.param_groups[0]["lr"])

        def optimizer(parameters: Any) -> Any:
            made = sgd(parameters)
            schedules.append(make(made))
            return made

        train(side, net(), floats(5, 6), optimizer=optimizer, steps=6, between=between)

    return run


def several_optimizers(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    optimizers = [torch.optim.Adam(module[0].parameters()), sgd(module[2:].parameters())]
    for step in range(4):
        for each in optimizers:
            each.zero_grad()
        side.note("loss", back(model(side.batch(step, 5, 6))))
        for each in optimizers[: 1 + step % 2]:
            each.step()
    side.note("end", module)


def parameter_groups(parameters: Any) -> Any:
    first, *others = parameters
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": others}], lr=0.01
    )


def divided(make: Callable[[Any], Any], schedule: Any = None) -> Callable[[Side], None]:
    """A ShardedOptimizer, and an optimizer of all in a DistributedDataParallel; weights alone decay."""

    def run(side: Side) -> None:
        module = net()
        named = list(module.named_parameters())
        groups = [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.2},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.003},
        ]
        if side.ours:
            from muster.torch.sharded_optimizer import ShardedOptimizer

            session = SimpleNamespace(communicator=side.communicator)
            model, optimizer = module, ShardedOptimizer(module, session, make=make, groups=groups)
        else:
            model, optimizer = side.wrap(module), make(groups)
        scheduler = schedule(optimizer) if schedule else None
        for step in range(6):
            optimizer.zero_grad()
            side.note("loss", back(model(side.batch(step, 5, 6))))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
                side.note("rates", scheduler.get_last_lr())
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for name, parameter in named:
                side.note(f"{step} {name}", parameter)
        state = optimizer.state_dict()
        for number, values in state["state"].items():
            for name, value in values.items():
                side.note(f"{number} {name}", value)
        side.note("groups", state["param_groups"])

    return run


def state_taken_over(side: Side) -> None:
    """Saved in the midst, loaded into others, gone on with."""
    module = images()
    model = train(side, module, floats(4, 3, 5, 5), optimizer=torch.optim.Adam)
    state = copy.deepcopy(model.state_dict() if side.ours else model.module.state_dict())
    other = images()
    other.load_state_dict(state)
    train(side, other, floats(4, 3, 5, 5))


def loaded_into_the_wrapper(side: Side) -> None:
    module = net()
    state = net().state_dict()
    model = side.wrap(module)
    loads = model if side.ours else model.module
    loads.load_state_dict({name: torch.full_like(value, 0.05) for name, value in state.items()})
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.note("loss", back(model(side.batch(step, 5, 6))))
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    side.note("end", module)


def adversaries(side: Side) -> None:
    """Two wrapped modules, of which one trains through the other."""
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    makes, judges = side.wrap(generator), side.wrap(critic)
    optimizers = sgd(makes.parameters()), sgd(judges.parameters())
    for step in range(3):
        noise = side.batch(step, 5, 4)
        optimizers[1].zero_grad()
        judged = judges(torch.cat([makes(noise).detach(), side.batch(step + 9, 5, 6)]))
        side.note("judged", back(judged))
        optimizers[1].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(False)
        side.note("made", back(judges(makes(noise))))
        critic.requires_grad_(True)
        optimizers[0].step()
    side.note("generator", generator)
    side.note("critic", critic)


def two_wrapped_one_loss(side: Side) -> None:
    first, second = nn.Linear(6, 4), nn.Linear(4, 2)
    models = side.wrap(first), side.wrap(second)
    optimizer = sgd([*models[0].parameters(), *models[1].parameters()])
    for step in range(3):
        optimizer.zero_grad()
        side.note("loss", back(models[1](models[0](side.batch(step, 5, 6)))))
        optimizer.step()
    side.note("first", first)
    side.note("second", second)


def averaged_weights(of_the_wrapper: bool) -> Callable[[Side], None]:
    def run(side: Side) -> None:
        kept: list[Any] = []

        def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
            averaged = model if of_the_wrapper else model.module
            if not kept:
                kept.append(torch.optim.swa_utils.AveragedModel(averaged))
            kept[0].update_parameters(averaged)

        train(side, images(), floats(4, 3, 5, 5), steps=4, between=between)
        side.note("average", kept[0])

    return run


def a_copy_of_the_wrapper(through: Callable[[Any], Any]) -> Callable[[Side], None]:
    """The copy trains on by itself, and what was copied too."""

    def run(side: Side) -> None:
        model = train(side, images(), floats(4, 3, 5, 5), steps=2, small=True)
        with side.session():
            other = through(model)
        for each in (other, model):
            optimizer = sgd(each.parameters())
            for step in range(2):
                optimizer.zero_grad()
                side.note("loss", back(each(side.batch(7 + step, 4, 3, 5, 5))))
                optimizer.step()
            side.note("end", each.module)

    return run


def state_of_the_wrapper(side: Side) -> None:
    """By torch.distributed.checkpoint, with the names that it gives them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = side.wrap(images())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        back(model(side.batch(step, 4, 3, 5, 5)))
        optimizer.step()
    states = get_state_dict(model, optimizer)
    for name, value in (states[0] if side.rank == 0 else {}).items():
        side.note(name, value)
    for name, values in states[1]["state"].items():
        for key, value in values.items():
            side.note(f"{name} {key}", value)
    side.note("groups", states[1]["param_groups"])
    other = side.wrap(images())
    again = torch.optim.AdamW(other.parameters())
    set_state_dict(other, again, model_state_dict=states[0], optim_state_dict=states[1])
    for step in range(2):
        again.zero_grad()
        side.note("loss", back(other(side.batch(step, 4, 3, 5, 5))))
        again.step()
    side.note("end", other.module)


def evaluated_between(side: Side) -> None:
    def between(side: Side, model: Any, optimizer: Any, step: int) -> None:
        model.eval()
        with torch.no_grad():
            output = model.module(side.batch(90, 4, 3, 5, 5))
        if side.rank == 0:
            side.note("evaluated", output)
        model.train()

    train(side, images(), floats(4, 3, 5, 5), steps=4, between=between)


def a_part_in_eval_mode(side: Side) -> None:
    module = images()

    def step_of(model: Any, optimizer: Any, x: Any) -> Any:
        module[1].eval()
        return back(model(x))

    train(side, module, floats(4, 3, 5, 5), step_of=step_of)


def recurrent_by_hand(side: Side) -> None:
    def step_of(model: Any, optimizer: Any, x: Any) -> Any:
        hidden = x
        for _ in range(4):
            hidden = model(hidden)
        return back(hidden)

    train(side, nn.Linear(6, 6), floats(5, 6), step_of=step_of)


def wrapped_again(side: Side) -> None:
    module = net()
    model = side.wrap(module)
    back(model(side.batch(0, 5, 6)))
    del model
    module.zero_grad()
    train(side, module, floats(5, 6))


def a_copy(side: Side) -> None:
    module = net()
    train(side, module, floats(5, 6), steps=1)
    module.zero_grad()
    train(side, copy.deepcopy(module), floats(5, 6))


def called_with_its_own(model: Any, optimizer: Any, x: Any) -> Any:
    """By the names that the wrapper gives, some halved on the way."""
    parameters = {
        name: each * 0.5 if name.endswith("bias") else each for name, each in model.named_parameters()
    }
    loss = loss_of(torch.func.functional_call(model, parameters, (x,)))
    loss.backward()
    return loss


def called_with_others(side: Side) -> None:
    """Tensors of the caller's own have each rank's own gradients; afterwards the module's count again."""
    module = net()
    model = side.wrap(module)
    others = {  # by DDP's names, which ours takes, too
        f"module.{name}": (each.detach() + 1).requires_grad_() for name, each in module.named_parameters()
    }
    x = floats(4, 6)(side, 0)
    loss_of(torch.func.functional_call(model, others, (x,))).backward()
    for name, each in others.items():
        side.note(name, each.grad)
    side.note("untouched", module)
    taken = torch.func.grad(lambda given: loss_of(torch.func.functional_call(model, given, (x,))))
    for name, gradient in taken({name: each.detach() for name, each in others.items()}).items():
        side.note(f"{name} by torch.func.grad", gradient)
    loss_of(model(x)).backward()
    side.note("afterwards", module)


def partly_cleared(model: Any, optimizer: Any, x: Any) -> Any:
    back(model(x))
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None
    return back(model(x))


WAYS: dict[str, Callable[[Side], Any]] = {
    "sparse gradients, accumulated": lambda side: train(
        side, Words(), integers(9, 3, 5), optimizer=plain_sgd, step_of=accumulates_in_rows
    ),
    "sgd with nesterov and weight decay": optimized(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    ),
    "sgd, fused": optimized(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "sgd, for each, ascending": optimized(lambda p: torch.optim.SGD(p, lr=0.01, foreach=True, maximize=True)),
    "adam": optimized(torch.optim.Adam),
    "adam, amsgrad": optimized(lambda p: torch.optim.Adam(p, amsgrad=True)),
    "adamw, fused": optimized(lambda p: torch.optim.AdamW(p, fused=True)),
    "adadelta": optimized(torch.optim.Adadelta),
    "adagrad": optimized(torch.optim.Adagrad),
    "adamax": optimized(torch.optim.Adamax),
    "asgd": optimized(torch.optim.ASGD),
    "nadam": optimized(torch.optim.NAdam),
    "radam": optimized(torch.optim.RAdam),
    "rmsprop": optimized(lambda p: torch.optim.RMSprop(p, centered=True)),
    "rprop": optimized(torch.optim.Rprop),
    "adafactor": optimized(lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "lbfgs": lbfgs,
    "groups of parameters": optimized(parameter_groups),
    "divided adamw": divided(lambda groups: torch.optim.AdamW(groups, lr=0.01)),
    "divided sgd with a schedule": divided(
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], total_steps=10),
    ),
    "several optimizers": several_optimizers,
    "rate in steps": scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)),
    "one cycle": scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=10)),
    "cosine after warm-up": scheduled(
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
            ],
            [2],
        )
    ),
    "accumulation": stepping(accumulates),
    "accumulation in many buckets": stepping(accumulates, small=True),
    "accumulation without no_sync": stepping(accumulates_synchronised),
    "gradients partly cleared": stepping(partly_cleared),
    "clipped norm": stepping(clips_norm),
    "clipped values": stepping(clips_value),
    "gradients set by hand": stepping(edits_gradients),
    "zeroed gradients": stepping(keeps_zeros),
    "autocast": stepping(autocasts),
    "gradient scaler, with an overflow on one rank": scaled,
    "several forward passes": stepping(several_forwards),
    "gradient penalty": stepping(penalises_gradients),
    "gradient of the input": stepping(gradient_of_the_input),
    "forward passes without gradient between": stepping(looks_between),
    "recurrent by hand": recurrent_by_hand,
    "frozen": frozen_while,
    "frozen later and wrapped again": frozen_later,
    "frozen for a while": frozen_for_a_while,
    "unfrozen after wrapping": unfrozen_later,
    "unused parameters": ways("left", "left"),
    "parameters used on one rank": ways("left", "right"),
    "other parameters in each step": changing_ways,
    "loss of a part of the output": loss_of_a_part,
    "other batch sizes on each rank": uneven_sizes,
    "hooks": hooked,
    "checkpointing": layer(lambda: Checkpointed(False), floats(5, 6)),
    "checkpointing, reentrant": layer(lambda: Checkpointed(True), floats(5, 6)),
    "checkpointing in sequence": layer(lambda: Checkpointed(False, True), floats(5, 6)),
    "checkpointing and accumulation": lambda side: train(
        side, Checkpointed(False), floats(5, 6), step_of=accumulates
    ),
    "state taken over": state_taken_over,
    "state loaded into the wrapper": loaded_into_the_wrapper,
    "adversaries": adversaries,
    "two wrapped modules, one loss": two_wrapped_one_loss,
    "averaged weights": averaged_weights(False),
    "averaged weights of the wrapper": averaged_weights(True),
    "a copy of the wrapper": a_copy_of_the_wrapper(copy.deepcopy),
    "a wrapper through a pickle": a_copy_of_the_wrapper(lambda model: pickle.loads(pickle.dumps(model))),
    "state of the wrapper": state_of_the_wrapper,
    "evaluated between": evaluated_between,
    "a part in eval mode": a_part_in_eval_mode,
    "called with its own parameters": stepping(called_with_its_own),
    "called with other parameters": called_with_others,
    "wrapped again": wrapped_again,
    "a copy of what was wrapped": a_copy,
}

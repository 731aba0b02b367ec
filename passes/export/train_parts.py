"""The parts of ``train.py`` that are the same for every model; words in capitals are filled in."""

WORKLOAD_FILE = '''\
def workload():
    """The model, its loss function (None: it has its own), and minibatches (inputs, target)."""
    if not TARGET.exists():
        raise SystemExit(f"{TARGET} is missing: say at TARGET where the model is")
    spec = importlib.util.spec_from_file_location(TARGET.stem, TARGET)
    module = importlib.util.module_from_spec(spec)
    sys.modules[TARGET.stem] = module
    sys.path.append(str(TARGET.parent))
    spec.loader.exec_module(module)
    made = module.FUNCTION()
'''

WORKLOAD_MODULE = '''\
def workload():
    """The model, its loss function (None: it has its own), and minibatches (inputs, target)."""
    made = importlib.import_module("PLACE").FUNCTION()
'''

FIELDS = '''\
    if not isinstance(made, tuple):
        made = (made.model, made.example_inputs, made.loss_fn, made.batches)
    model, inputs, loss_fn, batches = (*made, None, None)[:4]
    if batches is None:
        return model, loss_fn, [(inputs, None)] * STEPS
    return model, loss_fn, list(itertools.islice(batches(), STEPS))


def call_of(model, inputs):
    """The model's call: inputs by the names that forward has for them."""
    signature = inspect.signature(model.forward)
    if isinstance(inputs, dict):
        return signature.bind(**inputs)
    return signature.bind(*(inputs if isinstance(inputs, tuple) else (inputs,)))


def examples(k):
    """What goes into stage k as tensors without memory: with these torch runs no stage to see."""
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient)
        for shape, dtype, gradient in CROSSING[k]
    )
'''

MAKE_PARTS = '''\
def make_parts(rank, model, device):
    """The stages of this rank, with the model's weights, by number."""
    parts = {k: part() for k, part in enumerate(PARTS) if RANKS[k] == rank}
    state = model.state_dict()
    FILL
    for k, part in parts.items():
        load(part, HERE / f"stage_{k}.pt")  # buffers that state_dict() does not have
        own = {name: state[name] for name in part.state_dict() if name in state}
        part.load_state_dict(own, strict=False)
        part.to(device)
    return parts
'''

TIED = '''\
def tied_groups():
    """For each tied weight the group of the ranks that hold it; every rank calls this."""
    return [dist.new_group(sorted({RANKS[k] for k, _ in holders})) for holders in TIED]


def sum_tied(parts, groups):
    """Adds up the gradients of tied weights over stages: copies then stay equal."""
    for holders, group in zip(TIED, groups, strict=True):
        own = [parts[k].get_parameter(name) for k, name in holders if k in parts]
        if own:
            total = sum((p.grad for p in own if p.grad is not None), torch.zeros_like(own[0]))
            dist.all_reduce(total, group=group)
            for parameter in own:
                parameter.grad = total.clone()
'''

CLIP = '''\
def clip(parts, device):
    """As clip_grad_norm_ of the whole model; a tied weight counts once."""
    copies = TIED_COPIES
    gradients = {
        parameter: (k, name) in copies
        for k, part in parts.items()
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }
    squares = [p.grad.pow(2).sum() for p, copied in gradients.items() if not copied]
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    for parameter in gradients:
        parameter.grad.mul_((LIMIT / (total.sqrt() + 1e-6)).clamp(max=1.0))
'''

NO_DROPOUT = '''\
class NoDropout(TorchFunctionMode):
    """Dropout keeps everything: a pipeline draws other numbers than plain PyTorch does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if name == "multi_head_attention_forward":
            kwargs["training"] = False  # is about its dropout alone
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # their only float is their dropout
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        return func(*args, **kwargs)
'''

AGAIN = '''\
def again():
    """Contexts of a checkpoint: what runs again in backward is without dropout too."""
    return contextlib.nullcontext(), NoDropout()
'''

PLAIN = '''\
def rows(value, i):
    """Microbatch i of a tensor with a row for each sample; all else is for every microbatch."""
    split = isinstance(value, torch.Tensor) and value.ndim and len(value) == BATCH
    return value.chunk(MICROBATCHES)[i] if split else value


def plain(model, loss_fn, batches):
    """The same steps in plain PyTorch: losses; the model has the weights."""
    optimizer, means = make_optimizer(model.parameters()), []
    for inputs, target in batches:
        optimizer.zero_grad()
        call, losses = call_of(model, inputs), []
        for i in range(MICROBATCHES):
            call_i = copy.copy(call)
            call_i.arguments = {name: rows(value, i) for name, value in call.arguments.items()}
            with REGION:
                output = model(*call_i.args, **call_i.kwargs)
                if loss_fn is not None:
                    loss = loss_fn(output, rows(target, i))
                elif isinstance(output, torch.Tensor):
                    loss = output
                else:
                    loss = output["loss"] if isinstance(output, dict) else output.loss
            loss.backward()
            losses.append(loss.detach())
        DIVIDE
        CLIP_MODEL
        optimizer.step()
        means.append(torch.stack(losses).MEAN().item())
    return means
'''

COMPARE = '''\
def difference(found, expected, scale):
    """The largest difference of a tensor, and its name: root mean square, as a share of that of
    `scale`'s tensor, or of a thousandth of the largest there is."""

    def size(tensor):
        return tensor.double().pow(2).mean().sqrt().item() if tensor.numel() else 0.0

    sizes, worst = {name: size(scale[name]) for name in found}, (0.0, "equal bit for bit")
    least = max([1e-30, *(1e-3 * value for value in sizes.values())])
    for name in found:
        off = size(found[name].double() - expected[name].double())
        if off != 0.0:  # NaN is not 0 either
            worst = max(worst, (off / max(sizes[name], least), name))
    return worst


def gradient(parameter):
    """None is as far from a gradient as zeros are."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def differences(parts, model, begin):
    """Of gradients, of weights as shares of what they changed, of buffers."""
    end, kept = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    weights, buffers, gradients = {}, {}, {}
    for part in parts.values():
        own = dict(part.named_parameters(remove_duplicate=False))
        for name, value in part.state_dict().items():
            if name in end:
                (weights if name in own else buffers)[name] = value
        gradients |= {name: gradient(own[name]) for name in own if name in kept}
    expected = {name: gradient(kept[name]) for name in gradients}
    changed = {name: end[name] - begin[name] for name in weights}
    return (
        difference(gradients, expected, expected),
        difference(weights, end, changed),
        difference(buffers, end, end),
    )
'''

AGREE = '''\
def agree(model, batches):
    """Ends where ranks do not have the same model and data: each makes its own."""
    own = []
    for tensors in (model.state_dict(), batches):
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        own.append([leaf.cpu().contiguous().flatten().view(torch.uint8).sum() for leaf in leaves])
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for what, values in zip(("weights", "minibatches"), zip(*found), strict=True):
        if any(value != values[0] for value in values):
            raise SystemExit(
                f"ranks have different {what}: each makes its own, so FUNCTION() has to seed "
                "what it draws (torch.manual_seed)"
            )
'''

MAIN = """\
def main():
    if int(os.environ.get("WORLD_SIZE", 0)) != max(RANKS) + 1:
        raise SystemExit(f"start it with torchrun --nproc-per-node={max(RANKS) + 1}")
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    CASTS
    dist.init_process_group("nccl" if cuda else "gloo")
    model, model_loss, batches = workload()
    model.to(device)
    if not model.training:  # else modules that are in another mode stay so
        model.train()
    batches = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batches)
    agree(model, batches)
    begin = copy.deepcopy(model.state_dict())
    with QUIET:
        parts, means = train(rank, model, device, batches)
        expected = plain(model, model_loss, batches)
    found = [None] * (max(RANKS) + 1)
    dist.all_gather_object(found, (means, differences(parts, model, begin)))
    means = next(m for m, _ in found if m)
    gaps = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(means, expected, strict=True)]
    worst = [(max(gaps), ""), *(max(of_ranks) for of_ranks in zip(*(d for _, d in found)))]
    shares = dict(zip(TOLERANCES, worst, strict=True))
    equal = all(share <= TOLERANCES[kind] for kind, (share, _) in shares.items())  # NaN is not
    if rank == 0:
        print("loss of each step:", *(f"{mean:.6f}" for mean in means))
        print("in plain PyTorch: ", *(f"{mean:.6f}" for mean in expected))
        for kind, (share, name) in shares.items():
            print(f"{kind}: {share:.1e} off, tolerance {TOLERANCES[kind]:.0e}  {name}".rstrip())
        print("equal" if equal else "NOT EQUAL")
    dist.destroy_process_group()
    if not equal:
        sys.exit(1)
"""

TRAIN = '''\
def train(rank, model, device, batches):
    """STEPS steps of this rank: its stages, and on the last stage's rank the losses."""
    parts, last, means = make_parts(rank, model, device), len(PARTS) - 1, []
    TIE
    stages = [
        PipelineStage(
            part, k, len(PARTS), device, input_args=examples(k), output_args=examples(k + 1)
        )
        for k, part in parts.items()
    ]
    schedule = SCHEDULE_CLASS(STAGES_OF_RANK, MICROBATCHES, loss_fn=make_loss(parts)SCALE)
    own = {p: None for part in parts.values() for p in part.parameters()}
    optimizer = make_optimizer(own or [torch.zeros(1)])  # none of its own: it steps nothing
    for inputs, target in batches:
        call, losses = call_of(model, inputs).arguments, []
        first = [call[name] for name in INPUTS] if 0 in parts else []
        later = {name: call[name] for name in LATER}
        optimizer.zero_grad()
        OWN
        schedule.step(*first, target=target, losses=losses, return_outputs=False, **later)
        SUM
        CLIP_PARTS
        optimizer.step()
        if last in parts:
            means.append(torch.stack(losses).MEAN().item())
    return parts, means
'''

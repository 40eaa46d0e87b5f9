import ctypes, sys, time, statistics, torch
sys.path.insert(0,'benchmarks')
from trtllm_dflash.kernels import delta_net as dn
from delta_nets import SHAPES, random_net, bytes_of
import trtllm_dflash; print(trtllm_dflash.__file__, flush=True)
SH=SHAPES['qwen3.5-27b']
LIB={}
def use(name):
    lib=LIB.setdefault(name, ctypes.CDLL(f'gpu_probe/{name}.so'))
    def run(fn, params, stream):
        e=getattr(lib,fn)(ctypes.byref(params), ctypes.c_void_p(stream if isinstance(stream,int) else stream.value))
        assert e==0,(name,fn,e)
    dn.run=run
    return lib
def setup(slots, rows, accepted):
    width=SH.channels+SH.value_heads*128
    x=torch.randn(slots*rows,width,device='cuda').bfloat16(); g=torch.randn(slots*rows,2*SH.value_heads,device='cuda').bfloat16()
    seg=torch.tensor([[s,1000,s*rows,rows] for s in range(slots)],dtype=torch.int32,device='cuda')
    return x,g,seg,torch.full((slots,),1000-accepted,dtype=torch.int32,device='cuda'),torch.zeros(slots,SH.key_heads,dtype=torch.int32,device='cuda')
def cut(net,slots):
    from dataclasses import replace
    return replace(net,**{k:getattr(net,k)[:slots] for k in('states','writes','keys','decays','window')})
def timed(nets,args,rounds=5):
    nets[0](*args); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for n in nets: n(*args)
    g.replay(); ts=[]
    for _ in range(rounds):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts)
def clone(net):
    from dataclasses import replace
    return replace(net,**{k:getattr(net,k).clone() for k in('states','writes','keys','decays','window')})
def main():
    torch.manual_seed(0)
    with torch.inference_mode():
        big=[random_net(SH,32) for _ in range(SH.nets)]
        r=lambda a,b: float((a.float()-b.float()).norm()/(b.float().norm()+1e-30))
        worst=lambda a,b: float(((a.float()-b.float()).norm(dim=-1)/(b.float().norm(dim=-1)+1e-30)).max())
        for slots,rows,names in ((1,16,'base f1 f4 f4_a f4_c'),(8,16,'base f1 f4 f4_b f4_c'),(32,16,'base f1 f4 f4_d'),(1,1,'base f4 f4_a'),(8,1,'base f4 f4_b'),(32,1,'base f4 f4_d'),(1,512,'base f4'),(8,40,'base f4')):
            nets=[cut(n,slots) for n in big] if slots<32 else big
            acc=min(6,rows); args=setup(slots,rows,acc)
            floor=48*bytes_of(SH,slots,rows,acc)/4.3e12*1e3
            base=None; line=[]; pristine=clone(nets[0])
            for name in names.split():
                use(name); own=clone(pristine); out=own(*args).float(); torch.cuda.synchronize(); err=''
                if base is None: base=(out,own)
                else: err='e%.0e,%.0e,%.0e,%.0e,%.0e'%(worst(out,base[0]),worst(own.states,base[1].states),worst(own.writes,base[1].writes),worst(own.keys,base[1].keys),r(own.window,base[1].window))
                if args[4].any(): err+=' COUNTERS'; args[4].zero_()
                line.append('%s %.3f %s'%(name,timed(nets,args),err))
            print('slots',slots,'rows',rows,'floor %.3f |'%floor,' | '.join(line),flush=True)
main()

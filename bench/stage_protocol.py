"""Runs load and math as Python for every block, checks the protocol of stages."""
from types import SimpleNamespace as N
import itertools
from lowbit.kernels.parts import schedule, shares, producer, pipeline
from lowbit.kernels.sm90 import mixed_gemm as mg
from tests.kernels.parts.plain import GL, plain
class Idx(list):
    def index(self,i): return self[i]
class St(int):
    def slice(self,a,b): return ('piece',a,b)
def gl_for(block,blocks):
    return N(**{**vars(GL),'program_id':lambda a:block,'num_programs':lambda a:blocks,'maximum':max,'constexpr':object,'cdiv':lambda a,b:-(-a//b),'arange':lambda *a:0,'where':lambda c,a,b:a if c else b,'zeros':lambda *a:0,'float32':None,'BlockedLayout':lambda *a:None})
def env(block,blocks):
    gl=gl_for(block,blocks); e={'gl':gl}
    Share=lambda *v:N(**dict(zip(('begin','end','first_tile','stretch_turns','whole_tile','turns'),v)))
    e['dealt_of']=plain(shares.dealt_of,**e); e['Share']=Share
    for n in ('share_of','tile_of','stretch_of','blocks_of'): e[n]=plain(getattr(shares,n),**e)
    for n in ('part_of','count','tile_at','first_token_of','iterations_of'): e[n]=plain(getattr(schedule,n),**{**e,'asm':lambda *a:0})
    for n in ('advance','previous'): e[n]=plain(getattr(pipeline,n),**e)
    return e
def run(tokens,m,n,k,wg,stages,splits,sections,stream,blocks,pieces,group=2):
    rows=64*wg
    C=N(stages=stages,stages_ahead=stages if tokens<128 else 2,stage_bytes=rows*32+tokens*128,iteration_stages=2,splits=splits,sections=sections,stream_k=stream,token_group=group,tile_tokens=tokens,tokens=tokens,rows=rows,columns=tokens,x_block=(tokens//pieces,64),x_pieces=pieces,x_row_bytes=128,paired=False,last_is_full=not stream,threads=1,threads_layout=None,accumulator=None,warps=4*wg,
        decode=N(pair_words=1,group_words=1),end=N(plain=True,channel_scale=False,bias=False,residual=False),store_by_tma=False)
    tiles=N(of_tokens=-(-m//tokens),of_channels=-(-n//rows),iterations=-(-k//128),tokens=m)
    done={}
    for b in range(blocks):
        e=env(b,blocks)
        fills=[]  # per fill: stage, expected, copied
        cur={}
        log=[]
        def expect(bar,stage,absent,C_,log=log): log.append(('expect',stage,C.stage_bytes-absent))
        def acquire(bar,stage,phase,absent,C_,log=log): log.append(('acquire',stage,phase)); log.append(('expect',stage,C.stage_bytes-absent))
        def tma(desc,at,full,x,log=log): log.append(('x',full,C.x_block[0]*128,at))
        prod={**e,'start_next':lambda:None,'await_previous':lambda:None,'say_ready':lambda *a:None,'expect':expect,'acquire':acquire,'tma_load':tma}
        prod['absent_bytes']=plain(producer.absent_bytes,**prod); prod['load_x']=plain(producer.load_x,**prod)
        copies=N(x_desc='x',x=Idx(St(i) for i in range(stages)),barriers=Idx(range(stages)),tiles=tiles)
        plain(producer.load,**prod)(copies,lambda c,full,stage,ct,kk,C_:log.append(('w',full,rows*32,ct,kk)),C)
        # fills
        order=[]
        state=[None]*stages; empties=[0]*stages  # number of acquires
        for ev in log:
            if ev[0]=='acquire': order.append(('acquire',ev[1],ev[2]))
            elif ev[0]=='expect': state[ev[1]]=[ev[2],0,[]]; order.append(('fill',ev[1],state[ev[1]]))
            elif ev[0] in 'wx':
                assert state[ev[1]] is not None,'copy before expect'
                state[ev[1]][1]+=ev[2]; state[ev[1]][2].append(ev)
        for o in order:
            if o[0]=='fill': assert o[2][0]==o[2][1],('bytes',o)
        # consumer
        cons=[]
        def read_words(w,stage,phase,there,C_):
            if there: cons.append(('wait',stage,phase))
            return ('words',stage)
        def finish(regs,stage,exists,C_):
            if exists: cons.append(('release',stage))
        def start(regs,x,acc,stage,C_): cons.append(('mma',stage)); return acc
        c={**e,'read_words':read_words,'finish':finish,'start':start,'decode':lambda words,*a:words,'nothing_decoded':lambda C_:None,'load_scales':lambda *a:(0,),'first_scales':lambda *a:(0,0),'prefetch_scales':lambda *a:None,'scales_of_pair':lambda *a:0,'barrier':lambda:None,'warpgroup_mma_wait':lambda *a,**kw:0,'prefetch_rows':lambda *a:None,'await_h':lambda *a:None,'tma_store_wait':lambda *a:None,'begin_end':lambda *a:None}
        c['multiply']=plain(mg.multiply,**c); c['multiply_in_sections']=plain(mg.multiply_in_sections,**c)
        def meet(*a): return False,0
        tilelog=[]
        c.update(meet=lambda at,acc,tile,split,C_:(False,0),meet_parts=lambda at,acc,turn,t,C_:(False,0),finish_end=lambda *a:None)
        p=N(w=None,x=None,scales=N(last_group=0),splits=None,applied=None,stream=None,out=N(M=m,N=n),tiles=tiles)
        plain(mg.math,**c)(p,C)
        # protocol: simulate
        prodq=list(order); consq=list(cons)
        full=[0]*stages; empt=[0]*stages; filled=[0]*stages
        pi=ci=0; steps=0
        nfill=sum(o[0]=='fill' for o in order); nw=sum(o[0]=='wait' for o in cons); nr=sum(o[0]=='release' for o in cons); nm=sum(o[0]=='mma' for o in cons)
        assert nfill==nw==nr==nm,(b,nfill,nw,nr,nm)
        while pi<len(prodq) or ci<len(consq):
            moved=False
            while pi<len(prodq):
                o=prodq[pi]
                if o[0]=='acquire':
                    # wait(parity): passes if phase with that parity has completed: completed count%2 != parity... waiting parity P passes when current phase parity != P
                    if (empt[o[1]]&1)==o[2]: break
                    # with initial parity 1 it passes at once
                else:
                    assert full[o[1]]-0>=0
                    full[o[1]]+=1
                pi+=1; moved=True
            while ci<len(consq):
                o=consq[ci]
                if o[0]=='wait':
                    if (full[o[1]]&1)==o[2]: break
                elif o[0]=='release': empt[o[1]]+=1
                ci+=1; moved=True
            if not moved: return ('DEADLOCK',b,prodq[pi:pi+3],consq[ci:ci+3],full,empt)
    return 'ok'
cases=[]
for tokens,wg,stages in ((256,2,4),(128,2,8),(64,4,8),(64,2,8),(32,4,8),(16,2,8)):
    for m in (1,max(1,tokens//2-3),tokens-1,tokens,tokens+1,2*tokens+7,5*tokens,700):
        for n,k in ((1544,1152),(3080,2048),(4616,640),(5120,512),(6144,1024)):
            T=-(-m//tokens)*-(-n//(64*wg)); I=-(-k//128)
            p=1 if m>=tokens else min(8,tokens//8)
            cases.append((tokens,m,n,k,wg,stages,1,1,False,min(132,T),p))
            ps=1 if m%tokens==0 else min(8,tokens//8)
            cases.append((tokens,m,n,k,wg,stages,1,1,True,max(1,min(132,T*I//2)),ps))
            if I>=4: cases.append((tokens,m,n,k,wg,stages,1,min(4,I),False,min(132,T),p)); cases.append((tokens,m,n,k,wg,stages,4,1,False,min(132,4*T),p))
import random; random.seed(0); random.shuffle(cases)
import time; t=time.time(); cnt=0
for c in cases:
    r=run(*c); cnt+=1
    if r!='ok': print(c,r); break
    if time.time()-t>150: break
print(cnt,len(cases))
